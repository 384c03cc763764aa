"""Rules that join keys of several sections: which values go together, and what is accepted and may surprise.

Pure: a Config in, (path, message) out. Each rule names the keys it reads and is left out when one of them is broken.
Every refusal shows its arithmetic. It knows neither files nor how a configuration is loaded.
"""
