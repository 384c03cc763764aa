"""Reports: the only reader of a run, used by the command line, the report file, the studio and notebooks.

The files of a run (run_reader.py), its status (status.py) and jobs (jobs.py), summary, charts, the metric table, its
lineage as traces and SQL (lineage/), and HTML pages (page/). Reports never write to a run, except for `report.html`.
"""
