"""The program of the host process. Main thread."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from fast_batcher._host.rendezvous import announce, retire
from fast_batcher._host.server import HostServer


class Inherited:
    """The listening socket, and the starter's stderr, which the host's output goes to in the end.

    Until the first client is welcomed the output goes to a file, from which the starter reads why
    a host has died.
    """

    # Arguments on the command line.
    COUNT = 3

    def __init__(self, arguments: Sequence[str]) -> None:
        listener, self._stderr = map(int, arguments[: self.COUNT - 1])
        for fd in (listener, self._stderr):
            # Workers do not inherit them.
            os.set_inheritable(fd, False)
        self.listener = socket.socket(fileno=listener)
        # The identity of the socket, by `identify_socket`.
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


def main() -> None:
    """Run the host process from its start to its end."""
    # The terminal sends Ctrl-C to the server, which says goodbye.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = Inherited(sys.argv[1:])
    if not announce(inherited.listener, inherited.socket_id):
        return  # the host was stopped, and another has taken its place
    with asyncio.Runner() as runner:
        server = runner.run(_serve(inherited))
    if inherited.listener.fileno() >= 0:  # it has not stepped down
        retire(inherited.listener, inherited.socket_id)
    _exit_with(server)


def _exit_with(_: HostServer) -> NoReturn:
    """End the process while it has the server's connections, whose end tells of its death."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


async def _serve(inherited: Inherited) -> HostServer:
    server = HostServer(inherited.listener, inherited.release_output)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.asked_to_end)
    await server.ended
    await server.aclose()
    return server
