"""Synchronizer: how weights get from trainer ranks to engines.

The trainer publishes a version (publisher.py); its manifest makes it exist (manifest.py); engines fetch and verify it
(published.py, node_cache.py). styles.py decides which version an explore step uses, actor.py shortens the wait for it.
transports/ moves the bytes, delta.py is an encoding, and fingerprint.py proves what an engine serves.
"""
