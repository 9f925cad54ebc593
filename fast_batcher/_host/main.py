"""The program of the host process. Main thread."""

import asyncio
import os
import signal
import sys
from typing import NoReturn

from fast_batcher._host.inherited import Inherited
from fast_batcher._host.rendezvous import announce, retire
from fast_batcher._host.server import HostServer


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
