"""Command line: app.py lists the commands; the module of a command is imported when the command is called."""
