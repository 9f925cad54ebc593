"""Says when requests are due, in a separate process, so that the measured one cannot hold it up.

    python -m benchmarks.clients open RATE SECONDS SEED
    python -m benchmarks.clients closed CLIENTS SECONDS SEED

The arrivals of an open loop depend on nothing, like those of many independent users. In a closed
loop each client asks again a pause after its answer. Both are the simulation's loads. Timers of an
event loop are too coarse for pauses below a millisecond: asyncio rounds up to whole ones.

Each request is written to stdout: the moment at which it was due, on the clock of
`time.perf_counter`, and the client's number. In a closed loop the other end writes such records to
stdin: the moment of the answer, and whose it was. After SECONDS no request is due any more; the
process then waits for the end of its input, so that its CPU time can still be read.
"""

import os
import select
import struct
import sys
import time

from benchmarks.simulation.loads import ClosedLoop, short_pause
from fast_batcher._cli.simulation import Arrivals, poisson

# A moment and a client's number.
RECORD = struct.Struct("<dI")


def make_load(kind: str, number: str, seconds: float, seed: int) -> Arrivals:
    """Make the load that the command line names."""
    if kind == "open":
        return Arrivals(poisson(float(number), seconds, seed))
    return ClosedLoop(int(number), short_pause, seed)


def main() -> None:
    """Tell of each request when it is due, until the time is over."""
    kind, number, seconds, seed = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    load = make_load(kind, number, seconds, seed)
    output, source = sys.stdout.fileno(), sys.stdin.fileno()
    start = time.perf_counter()
    while (now := time.perf_counter() - start) < seconds:
        asks = []
        while load.next_at <= now:
            moment = start + load.next_at
            asks.append(RECORD.pack(moment, load.pop()))
        if asks:
            # In one write: after a hold-up they come together.
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
