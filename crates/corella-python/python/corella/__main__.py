"""The command `corella`."""

import signal
import sys

from corella._corella import run_command


def main() -> None:
    """Runs the command in this process, which ends with it."""
    # Python's own handler waits for the interpreter, which does not run meanwhile.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_command(["corella", *sys.argv[1:]])


if __name__ == "__main__":
    main()
