"""Serve: a policy as OpenAI's API, whose sessions become experiences of a run once somebody says what they were worth.

Its engines are on this machine, or on Dask's workers. The folder knows no tasksets and no workflows: who asks is the
agent, and who rewards the environment.
"""
