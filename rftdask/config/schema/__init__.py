"""The sections of the configuration: every key with its type, default and meaning, and the numbers derived from them.

A rule that joins sections is in rftdask.config.cross_checks. It knows no component that reads a section.
"""
