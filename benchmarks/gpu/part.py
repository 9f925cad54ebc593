"""A part of the benchmark in its own process: its settings, and the rows that it writes.

    python -m benchmarks.gpu.part NAME DEVICE SECONDS REPETITIONS ROWS

The part appends each row to the file ROWS as soon as it is measured, so the rows of a part that
fails or exceeds its limit are kept.
"""

import asyncio
import importlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.load.gpu import GpuWatch
from fast_batcher.errors import BatcherError

T = TypeVar("T")
Figures = dict[str, float]
# Seed of weights, inputs, lengths and arrivals.
SEED = 1
# Unmeasured share of each closed loop, for the queue and the batch size to settle.
WARM_UP_SHARE = 0.3


class Run:
    """The settings of a part, and the file that receives its rows.

    Args:
        device: "cuda" or "cpu".
        seconds: Length of each measurement.
        repetitions: Number of repetitions.
        path: The file.
    """

    def __init__(self, device: str, seconds: float, repetitions: int, path: Path) -> None:
        self.is_gpu = device == "cuda"
        # The name of the device for `devices=` of a batcher and for PyTorch in this process.
        self.device = "cuda:0" if self.is_gpu else "cpu"
        # Matrix units of GPUs compute bfloat16; few CPUs have such units.
        self.dtype = "bfloat16" if self.is_gpu else "float32"
        self.seconds = seconds
        self.repetitions = repetitions
        self._path = path

    def pick(self, gpu: T, cpu: T) -> T:
        """Return the setting of this device."""
        return gpu if self.is_gpu else cpu

    def title(self, table: str, text: str) -> None:
        """Write the title of a table."""
        self._write({"table": table, "title": text})

    def tell(self, table: str, system: str, repetition: int, figures: Figures) -> None:
        """Write the figures of one system in one repetition."""
        row = {"table": table, "system": system, "repetition": repetition, "figures": figures}
        self._write(row)

    def note(self, text: str) -> None:
        """Write a line that stands below the tables."""
        self._write({"note": text})

    def _write(self, row: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def take_turns(self, systems: Sequence[T]) -> Iterator[tuple[int, T]]:
        """Yield each system in each repetition, in every other repetition backwards."""
        for repetition in range(self.repetitions):
            for system in reversed(systems) if repetition % 2 else systems:
                yield repetition, system

    def bare_loop(
        self, infer: Callable[[list[Any]], object], batches: Sequence[list[Any]]
    ) -> Figures:
        """Compute the batches again and again, always all of them; `infer` waits for the device."""
        infer(batches[0])
        with GpuWatch() as gpu:
            start, passes = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - start) < self.seconds or not passes:
                for batch in batches:
                    infer(batch)
                passes += 1
        rate = passes * sum(map(len, batches)) / elapsed
        return {"requests_per_second": rate, **read_busy(gpu)}

    async def closed_loop(
        self, ask: Callable[[Any], Awaitable[bool]], inputs: Sequence[Any], callers: int
    ) -> Figures:
        """Keep one request of each caller in flight; count answers after the warm-up.

        Args:
            ask: Answers an input; returns whether the answer belongs to the input.
            inputs: The inputs, which the callers take in turn, over and over.
            callers: Number of callers.

        Raises:
            RuntimeError: An answer belongs to another input.
        """
        source = itertools.cycle(inputs)
        begin, cpu = time.perf_counter(), time.process_time()
        start = begin + WARM_UP_SHARE * self.seconds
        end = start + self.seconds
        answered = lost = 0

        async def call() -> None:
            nonlocal answered, lost
            while time.perf_counter() < end:
                try:
                    is_own = await ask(next(source))
                except BatcherError:
                    lost += 1
                    continue
                if not is_own:
                    raise RuntimeError("an answer belongs to another input")
                answered += start <= time.perf_counter() < end

        with GpuWatch() as gpu:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(callers):
                    tasks.create_task(call())
        busy = (time.process_time() - cpu) / (time.perf_counter() - begin)
        figures = {"requests_per_second": answered / self.seconds, "api_busy": busy}
        return {**figures, "lost": float(lost), **read_busy(gpu)}


def read_busy(gpu: GpuWatch) -> Figures:
    """Return the busy share of the GPU as a figure; nothing where it is unknown."""
    return {} if gpu.busy_share is None else {"gpu_busy": gpu.busy_share}


def main() -> None:
    """Run the part that the command line names."""
    # The command sends SIGTERM at the time limit: `finally` blocks then end what the part started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended at its time limit"))
    name, device, seconds, repetitions, rows = sys.argv[1:]
    part = importlib.import_module(f"benchmarks.gpu.{name}")
    part.measure(Run(device, float(seconds), int(repetitions), Path(rows)))


if __name__ == "__main__":
    main()
