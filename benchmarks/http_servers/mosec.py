"""Mosec: a web server in Rust, and a process for the model; for pictures, two that decode.

Variants: ""; "short queue" takes no more requests than it can answer in time, for a user who has
measured how many these are.
"""

import os
from typing import Any

import mosec  # type: ignore[import-not-found]
import numpy

from benchmarks.http_servers import WAIT, Job, Model
from benchmarks.pictures import decode

JOB = Job.read()
# One for each core.
DECODERS = 2


class Decode(mosec.Worker):  # type: ignore[misc]
    """A stage before the model."""

    def deserialize(self, data: bytes) -> bytes:
        """Take the file as it is."""
        return data

    def forward(self, data: bytes) -> Any:
        """Decode a file."""
        return decode(data)


class Echo(mosec.Worker):  # type: ignore[misc]
    """The model behind its steps."""

    def __init__(self) -> None:
        self.model = Model()

    def deserialize(self, data: bytes) -> Any:
        """Take the array or the text."""
        if JOB.shape:
            return numpy.frombuffer(data, "<f4").reshape(JOB.shape)
        return super().deserialize(data)["text"]

    def forward(self, data: list[Any]) -> list[Any]:
        """Compute a batch."""
        return self.model.infer(data)

    def serialize(self, data: Any) -> Any:
        """Answer the number or the text."""
        return super().serialize(data if JOB.shape else {"text": data})


if __name__ == "__main__":
    if JOB.limit:
        os.environ["MOSEC_TIMEOUT"] = str(int(1000 * JOB.limit))
        if JOB.variant:
            # Two batches fewer: one computes, and one is on its way.
            room = int(JOB.limit * JOB.capacity) - 2 * JOB.max_batch_size
            os.environ["MOSEC_CAPACITY"] = str(room)
    server = mosec.Server()
    wait = int(1000 * WAIT)
    if JOB.is_picture:
        server.append_worker(Decode, num=DECODERS, route="/predict")
    server.append_worker(
        Echo, max_batch_size=JOB.max_batch_size, max_wait_time=wait, route="/predict"
    )
    server.run()
