"""Descriptors that a host process inherits from its starter. Host process, main thread."""

import os
import socket
import sys
from collections.abc import Sequence


class Inherited:
    """The listening socket, and the starter's stderr, which the host's output goes to in the end.

    Until the first client is welcomed the output goes to a file, from which the starter reads why
    a host has died.

    Args:
        arguments: What `launch_host` has put first on the command line.
    """

    # Arguments on the command line.
    COUNT = 3

    def __init__(self, arguments: Sequence[str]) -> None:
        listener, self._stderr = map(int, arguments[: self.COUNT - 1])
        for fd in (listener, self._stderr):
            # Workers do not inherit them.
            os.set_inheritable(fd, False)
        self.listener = socket.socket(fileno=listener)
        # From `identify_socket`.
        self.socket_id = arguments[self.COUNT - 1]

    def release_output(self) -> None:
        """Send all further output to the starter's stderr. Call it once, at the first welcome."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # Workers inherit the standard streams.
        os.dup2(self._stderr, 1)
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
