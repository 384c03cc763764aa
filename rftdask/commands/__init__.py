"""Commands: what the command line does beside `run`, one module each; a program may call them, too.

They read a run from its files or start an Experiment. They know neither typer nor the terminal.
"""
