"""The models that are measured, without any library. They run in the systems' workers.

Every one answers each input with itself or a part of it, so that a system that mixes up answers is
noticed.
"""

import time
from typing import Any, Protocol

from benchmarks.simulation import models as simulated


class NoOp:
    """Takes no time: what remains is the batching itself."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself."""
        return inputs


class Flat5ms:
    """5 ms whatever the size, as a small network on a GPU."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself, after the model's time."""
        time.sleep(0.005)
        return inputs


def linear_seconds(size: int) -> float:
    """What `Linear5ms` takes for a batch of this size."""
    return 0.005 + 0.0001 * size


class Linear5ms:
    """5 ms and 0.1 ms for each input: gains from batching, yet never for free."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself, after the model's time."""
        time.sleep(linear_seconds(len(inputs)))
        return inputs


class Gpu:
    """The simulation's model of that name; tells each input the size of its batch too."""

    def infer(self, inputs: list[str]) -> list[tuple[str, int]]:
        """Answer each input with itself and the size, after the model's time."""
        time.sleep(simulated.MODELS["gpu"].seconds(len(inputs)))
        return [(value, len(inputs)) for value in inputs]


class Mid:
    """As `Gpu`."""

    def infer(self, inputs: list[str]) -> list[tuple[str, int]]:
        """Answer each input with itself and the size, after the model's time."""
        time.sleep(simulated.MODELS["mid"].seconds(len(inputs)))
        return [(value, len(inputs)) for value in inputs]


class ArrayLabel:
    """A number for each array, in no time: large inputs, small outputs."""

    def infer(self, inputs: list[Any]) -> list[float]:
        """Answer each array with its first number."""
        return [float(array.flat[0]) for array in inputs]


class ArrayRead:
    """A number for each array, once all of it has been read."""

    def infer(self, inputs: list[Any]) -> list[float]:
        """Answer each array with its largest number."""
        return [float(array.max()) for array in inputs]


class ArrayStacked:
    """When a batch was one array in the worker, and a number for each of its rows."""

    def infer(self, inputs: list[Any]) -> list[tuple[float, float]]:
        """Answer each array with that moment, and with its largest number, read after it."""
        batch = self.stack(inputs)
        assert len(batch) == len(inputs)
        moment = time.monotonic()
        return [(moment, float(row.max())) for row in batch]

    def stack(self, inputs: list[Any]) -> Any:
        """One array of them."""
        import numpy  # only where it is needed: not every environment has it

        return numpy.stack(inputs)


class ArrayEcho:
    """Each array back, in no time: large inputs, large outputs."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Answer each array with itself."""
        return inputs


class Model(Protocol):
    """What they have in common."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Answer each input."""
        ...


MODELS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (
        *(NoOp, Flat5ms, Linear5ms, Gpu, Mid),
        *(ArrayLabel, ArrayRead, ArrayStacked, ArrayEcho),
    )
}
# Those whose answers tell the size of the batch, and what the simulation calls them.
SIZED = {"Gpu": simulated.MODELS["gpu"], "Mid": simulated.MODELS["mid"]}
