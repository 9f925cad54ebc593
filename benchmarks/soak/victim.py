"""The program that S3 kills: a batcher under load that prints its workers' process ids."""

import asyncio
import json

from benchmarks.soak.models import Works
from benchmarks.soak.watch import worker_pids
from fast_batcher import BatcherError, DynBatcher


async def main() -> None:
    """Call in a loop until this process is killed."""
    async with DynBatcher(Works, num_workers=2) as batcher:

        async def ask() -> None:
            while True:
                try:
                    await batcher.process_batched(b"x" * 1000)
                except BatcherError:
                    return

        tasks = [asyncio.create_task(ask()) for _ in range(64)]
        await asyncio.sleep(0)
        print(json.dumps(worker_pids()), flush=True)
        await asyncio.wait(tasks)


if __name__ == "__main__":
    asyncio.run(main())
