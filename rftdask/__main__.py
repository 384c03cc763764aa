"""Entry point of the command `rftdask`. Ctrl-C during the imports ends it silently, like any other program."""

import signal


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rftdask.cli import app as cli  # late: Ctrl-C during its imports would print a traceback

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    main()
