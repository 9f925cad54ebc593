"""LitServe: an API process and a process for the model.

Variants: ""; "window", which waits up to 10 ms for a batch; a number of API processes.
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
    window = 0.01 if job.variant == "window" else 0.0
    api = Echo(max_batch_size=job.max_batch_size, batch_timeout=window)
    server = litserve.LitServer(
        api, accelerator="cpu", timeout=job.limit or 30, restart_workers=True
    )
    server.run(
        "127.0.0.1",
        int(sys.argv[1]),
        num_api_servers=int(job.variant) if job.variant.isdecimal() else 1,
        generate_client_file=False,
        access_log=False,
    )
