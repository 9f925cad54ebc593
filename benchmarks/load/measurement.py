"""A measurement of a server that the benchmark has started: its CPU time and the GPU, too.

Runs in the command's process, which sleeps meanwhile.
"""

from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from benchmarks.load.gpu import GpuWatch
from benchmarks.load.server import Server
from fast_batcher._load import client, measurement
from fast_batcher._load.measurement import Case, LoadMeasurement, LoadSettings

if TYPE_CHECKING:
    from benchmarks.cpu import TreeCpu


@dataclass(frozen=True)
class Target(client.Target):
    """Address of the server under load."""

    # None for a server that we did not start: its CPU time is not known.
    server: Server | None = None


class ResourceWatch:
    """Measures the CPU time of a server and the use of the GPU in a `with` block.

    Args:
        server: The server; None for one that we did not start.
    """

    def __init__(self, server: Server | None) -> None:
        self._server = server
        self._gpu = GpuWatch()
        self._before: TreeCpu | None = None
        self._used: TreeCpu | None = None

    def __enter__(self) -> Self:
        if self._server is not None:
            self._before = self._server.read_cpu()
        self._gpu.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gpu.__exit__(kind, error, traceback)
        if self._server is not None and self._before is not None and error is None:
            self._used = self._server.read_cpu().since(self._before)

    def figures(self, answers: float) -> dict[str, float]:
        """Return the figures of the block; CPU time is divided by the number of answers."""
        found = {}
        if self._used is not None and answers:
            found["api_cpu_ms"] = self._used.api / answers * 1e3
            found["workers_cpu_ms"] = self._used.workers / answers * 1e3
        if self._gpu.busy_share is not None:
            found["gpu_busy"] = self._gpu.busy_share
        return found


def measure(target: Target, case: Case, repetition: int, settings: LoadSettings) -> LoadMeasurement:
    """Put the target under a load; `repetition` is part of the seed."""
    watch = ResourceWatch(target.server)
    found = measurement.measure_case(target, case, repetition, settings, watch)
    return replace(found, figures=found.figures | watch.figures(found.figures["answers"]))
