"""Clients that ask again a pause after their answer: a process of its own.

    python -m benchmarks.clients CLIENTS SECONDS SEED

The event loops' own timers are no use for pauses below a millisecond: asyncio rounds up to whole
ones, uvloop to the nearest, so clients on them would not be those of the simulation. Here the
pauses are the simulation's, drawn from the same seeds.

What asks is written to stdout: the moment at which it was due, on the clock of
`time.perf_counter`, and the client's number. The other end writes such records to stdin: the
moment of the answer, and whose it was. After SECONDS nobody asks any more.
"""

import os
import select
import struct
import sys
import time

from benchmarks.simulation.loads import ClosedLoop, short_pause

# A moment and a client's number.
RECORD = struct.Struct("<dI")


def main() -> None:
    """Let the clients ask until time is over, then wait for the end of the input."""
    clients, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    load = ClosedLoop(clients, short_pause, seed)
    output, source = sys.stdout.fileno(), sys.stdin.fileno()
    start = time.perf_counter()
    while (now := time.perf_counter() - start) < seconds:
        asks = []
        while load.next_at <= now:
            moment = start + load.next_at
            asks.append(RECORD.pack(moment, load.pop()))
        if asks:
            os.write(output, b"".join(asks))
        # To the microsecond, but for the kernel's 50 us of slack.
        readable, _, _ = select.select([source], [], [], max(0.0, min(load.next_at, seconds) - now))
        if readable:
            records = os.read(source, RECORD.size * 4096)
            if not records:
                return  # the other end is gone
            for moment, client in RECORD.iter_unpack(records):
                load.settled(moment - start, client)
    os.close(output)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
