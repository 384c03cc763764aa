"""Entry of the command `rftdask`: while Python imports the rest, Ctrl-C ends it as it ends any program, in silence."""

import signal
import sys


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["run"]:
        _import_torch_ahead()
    from rftdask import cli  # late: Ctrl-C during its imports would be a traceback

    signal.signal(signal.SIGINT, before)
    cli.main()


def _import_torch_ahead() -> None:
    """Have what a run on one machine is forked from begin with what takes longest, before its configuration is read."""
    from rftdask.processes.gpus import has_gpu_devices  # late: as above
    from rftdask.processes.nursery import can_fork, start_nursery  # late: as above

    if can_fork(has_gpu_devices()):
        start_nursery(["torch"])


if __name__ == "__main__":
    main()
