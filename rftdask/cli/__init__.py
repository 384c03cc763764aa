"""Command line: one file per command. app.py lists the commands; each file is loaded when its command is called."""
