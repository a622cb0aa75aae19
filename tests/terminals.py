"""Commands on a terminal of their own."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

AT_ONCE = "from kl_guard import progress\nprogress.PATIENCE = 0\nprogress.EVERY = 0\n"  # without delay, each word shown
COMMAND = AT_ONCE + "import sys\nfrom kl_guard.cli import main\nsys.exit(main(sys.argv[1:]))"


class OnTerminal:
    """A process whose standard error is a terminal; its standard output is a pipe."""

    def __init__(self, code, *arguments, columns=80, **environment):
        self._master, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        known = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS", "CI"}}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=end,
            env={**known, "TERM": "xterm-256color", **environment},
        )
        os.close(end)

    def read_until(self, text):
        """Return what was shown up to some text, or to the end."""
        shown = b""
        while text.encode() not in shown:
            try:
                part = os.read(self._master, 4096)
            except OSError:  # how Linux says that nobody writes any more
                break
            if not part:
                break
            shown += part
        return shown.decode()

    def finish(self):
        """Return the exit status, standard output, and the rest that was shown."""
        shown = self.read_until("\0")
        out = self.process.stdout.read().decode()
        self.process.stdout.close()
        os.close(self._master)
        return self.process.wait(timeout=60), out, shown
