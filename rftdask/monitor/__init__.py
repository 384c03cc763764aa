"""Monitoring during a run: metrics on storage, trackers, progress views, logs and the events of roles."""
