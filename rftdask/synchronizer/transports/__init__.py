"""Transports of weights: shared memory on a node, a broadcast over Dask, a broadcast in a process group."""
