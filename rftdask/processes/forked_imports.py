"""What the fork server of nursery.py imports first: the modules that it is told of, with the garbage collector off. Nor
does the collector look at them later, in any fork: a look writes to every object, and so copies its page.
"""

import contextlib
import gc
import importlib
import os

from rftdask.processes.nursery import IMPORTS

if names := os.environ.pop(IMPORTS, ""):
    gc.disable()
    for name in names.split(","):
        with contextlib.suppress(ImportError):  # a fork that needs it says so
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
