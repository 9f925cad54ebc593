"""Ray Serve: its proxy, its controller and one replica on a cluster of one machine."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.http_servers import Job, Model

JOB = Job.read()


# By default five at a time, which are no batches.
@serve.deployment(max_ongoing_requests=1024)
class Echo:
    """The model behind its endpoint."""

    def __init__(self) -> None:
        self.model = Model()
        # So that the replica reads requests while the model computes.
        self.thread = ThreadPoolExecutor(1)

    @serve.batch(max_batch_size=JOB.max_batch_size)
    async def infer(self, inputs: list[str]) -> list[str]:
        """Compute a batch."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self.model.infer, inputs)

    async def __call__(self, request: Request) -> dict[str, str]:
        """Answer the model's text."""
        return {"text": await self.infer((await request.json())["text"])}


if __name__ == "__main__":
    ray.init(include_dashboard=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Echo.bind(), blocking=True)  # type: ignore[attr-defined]
