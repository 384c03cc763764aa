"""The folder of a run: its config, leases of roles, and fingerprints of inputs.

The package knows neither roles (explorer/, trainer/) nor the start of workers (cluster/).
"""
