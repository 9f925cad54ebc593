"""The program of the host process. Main thread."""

import asyncio
import signal
import sys

from fast_batcher._host.inherited import Inherited
from fast_batcher._host.rendezvous import retire
from fast_batcher._host.server import HostServer


def main() -> None:
    """Run the host process from its start to its end."""
    # The terminal sends Ctrl-C to the server, which says goodbye.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = Inherited(sys.argv[1:])
    with asyncio.Runner() as runner:
        runner.run(_serve(inherited))


async def _serve(inherited: Inherited) -> None:
    server = HostServer(inherited.listener, inherited.release_output)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.asked_to_end)
    await server.ended
    await server.aclose()
    retire(inherited.listener)
