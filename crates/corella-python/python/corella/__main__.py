"""The command `corella`."""

import signal
import sys

from corella._corella import run_command


def main() -> None:
    """Runs the command in this process. The process ends with the command."""
    # Python's own signal handler runs in the interpreter, which is blocked during the command.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_command(["corella", *sys.argv[1:]])


if __name__ == "__main__":
    main()
