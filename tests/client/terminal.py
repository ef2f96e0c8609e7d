"""A terminal with `corella chat` in it. A test reads its screen and types input."""

import os
import pty
import re
import select
import signal
import struct
import termios
from fcntl import ioctl

from patience import PATIENCE_S, wait_until
from server_process import BINARY

OPTIONS = ("--threads", "1", "--kv-cache-memory", "64M", "--temperature", "0")
PROMPT = ">>> "
UP, LEFT, HOME, END = "\x1b[A", "\x1b[D", "\x1b[H", "\x1b[F"
COOKED = termios.ICANON | termios.ECHO | termios.ISIG


def control(letter):
    return chr(ord(letter) - 64)


class Terminal:
    def __init__(self, home, *options, model_options=OPTIONS, **variables):
        environment = {**os.environ, "HOME": str(home), "TERM": "xterm", **variables}
        for name in {"XDG_STATE_HOME", "CORELLA_NO_HISTORY"} - set(variables):
            environment.pop(name, None)
        self.unread = ""
        self.raw = b""
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execve(BINARY, ["corella", "chat", *model_options, *options], environment)
        assert "corella-nano" in self.read_until(PROMPT)

    def set_columns(self, columns):
        ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_until(self, wanted):
        """Returns the output up to `wanted`, without control sequences."""
        while wanted not in self.unread:
            ready, _, _ = select.select([self.descriptor], [], [], PATIENCE_S)
            assert ready, f"no {wanted!r} in {self.unread!r}"
            shown = os.read(self.descriptor, 65536)
            self.raw += shown
            shown = shown.decode(errors="replace")
            self.unread += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).replace("\r", "")
        before, self.unread = self.unread.split(wanted, 1)
        return before

    def write(self, text):
        rest = text if isinstance(text, bytes) else text.encode()
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]

    def ask(self, text):
        """Enters a line, and returns the output below it up to the next prompt."""
        self.write(text + "\n")
        self.read_until("\n")
        self.unread = "\n" + self.unread
        return self.read_until("\n" + PROMPT).removeprefix("\n")

    def leave(self):
        """Waits for the end of the process, and returns its status."""

        def ended():
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return (status,) if pid else None

        try:
            (status,) = wait_until(ended, lambda: f"it leaves: {self.unread!r}")
        except AssertionError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        modes = termios.tcgetattr(self.descriptor)[3]
        assert modes & COOKED == COOKED, "the terminal is left as it was found"
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(status)
