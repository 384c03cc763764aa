"""Weights: the versions that a trainer publishes and explorers load (published.py), the manifest that makes a folder of
files exist (manifest.py), and the fingerprint by which an engine proves which weights it serves (fingerprint.py).

The folder does not know how weights are trained, when explorers take them (synchronizer/), nor what is in a tensor.
"""
