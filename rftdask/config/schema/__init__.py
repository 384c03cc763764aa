"""The sections of the configuration: every key with its type, default and meaning, and the numbers derived from them.

A rule between the keys of one section is a method of its class; one that joins sections is in
rftdask.config.cross_checks. It knows no component that reads a section.
"""
