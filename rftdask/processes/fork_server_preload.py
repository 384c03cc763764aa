"""First module that a fork server imports. It has a file of its own because a fork of the zygote, which starts during
this import, can never import this module: Python holds its lock."""

from rftdask.processes.fork_server import preload

preload()
