"""Clusters: where the Dask workers of a run are, and which roles they serve. One module per kind: this machine, with or
without dask-cuda, a cluster that is there already, a batch system; and what workers load and join by.

A cluster is registered by the class attribute `cluster_type` of its class. The folder does not know what the roles do
on its workers.
"""
