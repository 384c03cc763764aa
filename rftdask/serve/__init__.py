"""Serve: a policy behind OpenAI's API, whose rewarded sessions become experiences of a run.

Engines run on this machine or on Dask workers. The package has no tasksets and no workflows: the client is the agent,
and rewards arrive through `/feedback`.
"""
