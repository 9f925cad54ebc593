"""LitServe with a model that answers in steps: batches whose answers are streamed.

Arguments: the port, the model's name in `STEP_TIMES`, the path of its `StepCount`, and the batch
size. All answers of a batch go on until the longest ends; a client that has its chunks closes.
"""

import sys
from collections.abc import Iterator
from typing import Any

import litserve  # type: ignore[import-not-found]

from benchmarks.stepping import Stepper

# Of a request while more arrive than are served, seconds.
TIMEOUT = 300.0


class Streamed(litserve.LitAPI):  # type: ignore[misc]
    """The model behind its steps."""

    def setup(self, device: str) -> None:
        """Load it."""
        self._stepper = Stepper(*sys.argv[2:4])

    def decode_request(self, request: dict[str, int]) -> int:
        """Take the length."""
        return request["length"]

    def predict(self, x: list[int]) -> Iterator[list[str]]:
        """Take the steps of a batch."""
        for count in range(1, max(x) + 1):
            self._stepper.step(sum(length >= count for length in x))
            yield [f"chunk {count}\n"] * len(x)

    # LitServe makes a response model of what it is annotated to return.
    def encode_response(self, output: Iterator[list[str]]) -> Any:
        """Send texts as they are."""
        yield from output


if __name__ == "__main__":
    api = Streamed(max_batch_size=int(sys.argv[4]), stream=True)
    server = litserve.LitServer(api, accelerator="cpu", timeout=TIMEOUT)
    server.run("127.0.0.1", int(sys.argv[1]), generate_client_file=False, access_log=False)
