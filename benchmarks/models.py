"""The models that are measured, without any library. They run in the systems' workers.

Each answers an input with itself or a part of it, so that a system that mixes up answers is seen.
"""

import functools
import time
from typing import Any, Protocol

from benchmarks.simulation import models as simulated


class NoOp:
    """Takes no time, so that only the batching is measured."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself."""
        return inputs


class Flat5ms:
    """Takes 5 ms whatever the size, as a small network on a GPU."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself, after the model's time."""
        time.sleep(0.005)
        return inputs


class Linear5ms:
    """Takes 5 ms and 0.1 ms for each input: batching gains, and a larger batch costs more."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself, after the model's time."""
        time.sleep(0.005 + 0.0001 * len(inputs))
        return inputs


class Gpu:
    """Takes the time of the simulation's gpu model, and tells the size of each input's batch."""

    def infer(self, inputs: list[str]) -> list[tuple[str, int]]:
        """Answer each input with itself and the size, after the model's time."""
        time.sleep(simulated.MODELS["gpu"].seconds(len(inputs)))
        return [(value, len(inputs)) for value in inputs]


class ArrayLabel:
    """Takes no time and answers with a number: large inputs, small outputs."""

    def infer(self, inputs: list[Any]) -> list[float]:
        """Answer each array with its first number."""
        return [float(array.flat[0]) for array in inputs]


class ArrayStacked:
    """Stacks its batch and tells when that was done: large inputs, small outputs."""

    def infer(self, inputs: list[Any]) -> list[tuple[float, float]]:
        """Answer each array with the moment, and with its largest number, read afterwards."""
        batch = self.stack(inputs)
        assert len(batch) == len(inputs)
        moment = time.monotonic()
        return [(moment, float(row.max())) for row in batch]

    def stack(self, inputs: list[Any]) -> Any:
        """Make one array of them."""
        import numpy  # only where it is needed: not every environment has it

        return numpy.stack(inputs)


class ArrayEcho:
    """Takes no time and answers with the arrays: large inputs, large outputs."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Answer each array with itself."""
        return inputs


class RowIn:
    """Takes no time and answers with a number: rows of a table in, small outputs."""

    def infer(self, inputs: list[Any]) -> list[int]:
        """Answer each row with its length."""
        return [len(row) for row in inputs]


class RowOut:
    """Takes no time and answers with rows of a table of its own: small inputs."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}

    def infer(self, inputs: list[str]) -> list[Any]:
        """Answer each name of a kind with a row of that kind."""
        for kind in {*inputs} - self.rows.keys():
            self.rows[kind] = make_row(kind)
        return [self.rows[kind] for kind in inputs]


# Numbers in a row, as in an embedding, and rows of the table: 147 MiB.
ROW, TABLE = 384, 100_000


def make_row(kind: str, number: int = 0) -> Any:
    """Return a row of a table: "tensor", "array" or "list"."""
    row = _make_table(kind)[number]
    return row.tolist() if kind == "list" else row


@functools.cache
def _make_table(kind: str) -> Any:
    if kind == "tensor":
        import torch

        return torch.zeros(TABLE, ROW)
    import numpy  # only where it is needed: not every environment has it

    return numpy.zeros((TABLE, ROW), numpy.float32)


class Model(Protocol):
    """What they have in common."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Answer each input."""
        ...


MODELS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (
        *(NoOp, Flat5ms, Linear5ms, Gpu, ArrayLabel, ArrayStacked, ArrayEcho),
        *(RowIn, RowOut),
    )
}
