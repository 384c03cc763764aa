"""Commands that check a machine, a storage, the algorithms and the reliability of the package itself."""
