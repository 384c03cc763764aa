"""Entry of the command `rftdask`: while Python imports the rest, Ctrl-C ends it as it ends any program, in silence."""

import signal


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rftdask import cli  # late: Ctrl-C during its imports would be a traceback

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    main()
