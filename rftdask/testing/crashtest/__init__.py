"""Crash test: short runs of the real log, ledger, checkpoints and trainer loop, stopped, killed, unplugged and damaged
in every way we know, each of which must end as if nothing had happened.

It knows neither Dask nor models. Only here can a protection be taken away, to show what it is for.
"""
