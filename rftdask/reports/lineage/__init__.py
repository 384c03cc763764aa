"""What became of every experience: the files of a run as SQL tables, the trace of one experience, pages to browse."""
