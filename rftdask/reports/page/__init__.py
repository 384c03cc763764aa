"""HTML pages of a run and the report file that combines them; their templates, style sheet and scripts."""
