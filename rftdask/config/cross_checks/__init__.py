"""Rules that join keys of several sections, and warnings about accepted settings that may surprise.

Pure: a Config in, (path, message) out. Each rule names the keys it reads, and is skipped if one of them is broken.
Every refusal shows its arithmetic. The package knows neither files nor how a configuration is loaded.
"""
