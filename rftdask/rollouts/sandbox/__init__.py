"""Processes in which workflows run that may block, hang, crash or eat memory; Linux. It knows no engines or retries."""
