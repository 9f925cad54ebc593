"""An API process of S10: calls a shared batcher until a line comes, then tells what it saw."""

import asyncio
import json
import os
import sys
from collections import Counter
from time import monotonic

from benchmarks.soak.models import Item, SharedJournal, right_answer
from fast_batcher import BatcherError, DynBatcher

CALLERS = 32
# Of each call, seconds; an outcome that comes later than that and a second is lost.
TIMEOUT = 30.0
MOST_SECONDS = TIMEOUT + 1.0


async def main() -> None:
    """Call, count, tell."""
    counts: Counter[str] = Counter()
    longest, is_over = 0.0, False

    async def call(batcher: DynBatcher[Item, object], client: int) -> None:
        nonlocal longest
        sequence = 0
        while not is_over:
            # No other process has this number.
            nonce = ((os.getpid() * CALLERS + client) << 32) + sequence
            size = 100_000 if sequence % 100 == 0 else client
            item = Item(client, sequence, nonce, os.urandom(16) * (size // 16))
            sequence += 1
            begun = monotonic()
            try:
                answer = await batcher.process_batched(item)
            except BatcherError as error:
                counts[type(error).__name__] += 1
            else:
                counts["right" if answer == right_answer(item) else "WRONG"] += 1
            seconds = monotonic() - begun
            longest = max(longest, seconds)
            counts["LATE"] += seconds > MOST_SECONDS

    batcher: DynBatcher[Item, object] = DynBatcher(
        SharedJournal,
        num_workers=2,
        timeout=TIMEOUT,
        shared=True,
        max_restarts=None,
        restart_window=0.5,
    )
    async with batcher:
        print("ready", flush=True)
        tasks = [asyncio.create_task(call(batcher, client)) for client in range(CALLERS)]
        await asyncio.to_thread(sys.stdin.readline)
        is_over = True
        await asyncio.gather(*tasks)
    print(json.dumps({"counts": counts, "longest": longest}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
