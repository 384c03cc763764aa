"""Text as it may be stored and shown: without secrets (secrets.py), and plain on a terminal (terminal.py)."""
