"""Entry of the command `rftdask`: while Python imports the rest, Ctrl-C ends it as it ends any program, in silence."""

import importlib
import signal
import sys


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["run"]:
        _begin_imports()
    from rftdask.cli import app as cli  # late: Ctrl-C during its imports would be a traceback

    signal.signal(signal.SIGINT, before)
    cli.main()


def _begin_imports() -> None:
    """Have what a run on one machine is forked from begin with its imports, before this process has anything of the
    user's, or a thread, and while it reads the configuration.
    """
    from rftdask.processes.gpus import has_gpu_devices  # late: as above
    from rftdask.processes.zygote import REGISTERED, TOKENIZERS, TORCH, can_fork  # late: as above

    if can_fork(has_gpu_devices()):
        from rftdask.processes.fork_server import begin_fork_server  # late: as above

        importlib.import_module(REGISTERED)  # all take it, and this process first
        begin_fork_server(TOKENIZERS, [TORCH])


if __name__ == "__main__":
    main()
