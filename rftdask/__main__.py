"""Entry point of the command `rftdask`. A signal that comes before the command has its own handlers ends it silently,
with the same exit code."""

import os
import signal


def main() -> None:
    """Run the command line."""
    # A signal that is ignored (nohup, a background job of a shell) stays ignored.
    before = {
        number: signal.signal(number, lambda number, _: os._exit(128 + number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    from rftdask.cli import app as cli  # late: Ctrl-C during its imports would print a traceback

    if signal.SIGINT in before:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
    try:
        cli.main()
    finally:
        # After a KeyboardInterrupt inside `exec` of a string, which dataclasses use, Python would replace the exit code
        # by the signal. The next `exec` clears that.
        exec("")


if __name__ == "__main__":
    main()
