"""Entry point of the command `rftdask`. While Python imports the rest, Ctrl-C ends the process without a traceback."""

import importlib
import signal
import sys


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Not for `rftdask run` and `rftdask run --help`, which only print.
    if sys.argv[1:2] == ["run"] and sys.argv[2:] and "--help" not in sys.argv:
        _begin_imports()
    from rftdask.cli import app as cli  # late: Ctrl-C during this import would print a traceback

    signal.signal(signal.SIGINT, before)
    cli.main()


def _begin_imports() -> None:
    """Fork the servers that a run on one machine forks its processes from.

    They import torch while this process reads the configuration. The fork happens now, before this process has
    threads, or anything of the user's.
    """
    from rftdask.processes.gpus import has_gpu_devices  # late: as above
    from rftdask.processes.zygote import REGISTERED, TOKENIZERS, TORCH, can_fork  # late: as above

    if can_fork(has_gpu_devices()):
        from rftdask.processes.fork_server import begin_fork_server  # late: as above

        importlib.import_module(REGISTERED)  # every process needs it, so it is imported once before the fork
        begin_fork_server(TOKENIZERS, [TORCH])


if __name__ == "__main__":
    main()
