"""Monitoring: metrics on storage, trackers fed from them, charts, progress views, logs and the events of roles.

It knows how a number is stored and shown, and nothing of configurations, logs of experiences or ledgers.
"""
