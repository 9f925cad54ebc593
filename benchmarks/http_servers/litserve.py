"""LitServe: an API process and a process for the model.

Variants: ""; a number of API processes.
"""

import sys
from typing import Any

import litserve  # type: ignore[import-not-found]

from benchmarks.http_servers import Job, Model


class Echo(litserve.LitAPI):  # type: ignore[misc]
    """The model behind its steps."""

    def setup(self, device: str) -> None:
        """Load it."""
        self.model = Model()

    def decode_request(self, request: dict[str, str]) -> str:
        """Take the text."""
        return request["text"]

    def predict(self, x: list[str]) -> list[Any]:
        """Compute a batch."""
        return self.model.infer(x)

    def encode_response(self, output: str) -> dict[str, str]:
        """Answer the text."""
        return {"text": output}


if __name__ == "__main__":
    job = Job.read()
    api = Echo(max_batch_size=job.max_batch_size)
    server = litserve.LitServer(
        api, accelerator="cpu", timeout=job.limit or 30, restart_workers=True
    )
    server.run(
        "127.0.0.1",
        int(sys.argv[1]),
        num_api_servers=int(job.variant or 1),
        generate_client_file=False,
        access_log=False,
    )
