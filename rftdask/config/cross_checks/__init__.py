"""Rules that join keys of several sections: which values are compatible, and what is accepted but may surprise.

Pure: a Config in, (path, message) out. Each rule names the keys it reads, and is skipped if one of them is broken.
Every refusal shows its arithmetic. The package knows neither files nor how a configuration is loaded.
"""
