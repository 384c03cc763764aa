"""Processes for workflows that may block, hang, crash or exhaust memory (Linux). Does not know engines or retries."""
