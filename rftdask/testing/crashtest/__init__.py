"""Crash test: short runs of the real log, ledger, checkpoints and trainer loop are killed, lose power and are damaged
in every known way. Each of them must end as if nothing had happened.

It knows neither Dask nor models. Only here can a protection be disabled, to show what it is for.
"""
