"""``kvops`` and ``python -m kvops``: everything else is imported once Ctrl-C can no longer leave a traceback."""

import signal
import sys


def run() -> int:
    """The exit code of the command line."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing has begun that would have to be undone
    from kvops.cli.main import main

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
