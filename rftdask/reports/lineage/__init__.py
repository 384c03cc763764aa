"""Lineage of every experience: the files of a run as SQL tables, traces of experiences, and pages to browse them."""
