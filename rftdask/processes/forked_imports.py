"""What the fork server of nursery.py imports, as this module is imported there: the modules that `IMPORTS` names.

The garbage collector is off meanwhile, which saves a tenth of the time, and what was imported is never looked at again,
by no fork either: a look writes to every object, and so copies its page.
"""

import contextlib
import gc
import importlib
import os

IMPORTS = "RFTDASK_IMPORTS"
"""Environment: names of modules, with commas between them."""

if names := os.environ.pop(IMPORTS, ""):
    gc.disable()
    for name in names.split(","):
        with contextlib.suppress(ImportError):  # a fork that needs it says so
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
