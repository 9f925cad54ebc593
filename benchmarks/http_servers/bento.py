"""BentoML: its adaptive batching in its own server. Run by `bentoml serve`."""

import bentoml  # type: ignore[import-not-found]

from benchmarks.http_servers import Job, Model

JOB = Job.read()
LIMIT = JOB.limit or 60.0


@bentoml.service(traffic={"timeout": LIMIT})
class Echo:
    """The model in a worker of the server."""

    def __init__(self) -> None:
        self.model = Model()

    @bentoml.api(  # type: ignore[untyped-decorator]
        batchable=True,
        max_batch_size=JOB.max_batch_size,
        max_latency_ms=int(1000 * LIMIT),
        route="/predict",
    )
    def predict(self, text: list[str]) -> list[str]:
        """Compute a batch."""
        return self.model.infer(text)
