"""What a run tells: metrics on storage, trackers fed from them, progress views, the HTML report, logs."""
