"""Reports: the one reader of a run. Everything that shows a run (command line, report page, studio, notebooks) reads it
here: the run's files (run_reader.py), its state (status.py), summary, charts, metric table, and lineage/ (trace, SQL).

It only reads; it knows neither Dask nor the roles.
"""
