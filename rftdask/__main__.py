"""Entry of the command `rftdask`: while Python imports the rest, Ctrl-C ends it as it ends any program, in silence."""

import signal
import sys


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    ahead = sys.argv[1:2] == ["run"] and _import_torch_ahead()
    from rftdask import cli  # late: Ctrl-C during its imports would be a traceback

    if ahead:
        from rftdask.processes.fork_server import begin_fork_server  # late: as above
        from rftdask.processes.nursery import REGISTERED  # late: as above

        # With what the driver takes anyway, and before there is anything of the user's in this process.
        begin_fork_server(["distributed", REGISTERED])
    signal.signal(signal.SIGINT, before)
    cli.main()


def _import_torch_ahead() -> bool:
    """Have what a run on one machine is forked from begin with what takes longest, before its configuration is read;
    whether there is such a thing.
    """
    from rftdask.processes.gpus import has_gpu_devices  # late: as above
    from rftdask.processes.nursery import can_fork, start_nursery  # late: as above

    may_fork = can_fork(has_gpu_devices())
    if may_fork:
        start_nursery(["torch"])
    return may_fork


if __name__ == "__main__":
    main()
