"""Data made of data, beside any run: a run's log as a dataset; a dataset filtered, deduplicated and scored.

Commands: rftdask data export, rftdask data refine.
"""
