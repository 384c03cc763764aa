"""What the fork server imports first: the modules that it is told of, with the garbage collector off. Nor
does the collector look at them later, in any fork: a look writes to every object, and so copies its page.
"""

import contextlib
import gc
import importlib
import os

import setproctitle

from rftdask.processes.fork_server import IMPORTS

# It finds where titles are by the environment as the process began with it, and a worker has another by then.
setproctitle.getproctitle()
if names := os.environ.pop(IMPORTS, ""):
    gc.disable()
    for name in names.split(","):
        with contextlib.suppress(ImportError):  # a fork that needs it says so
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
