"""Models for the command `fast-batcher`, and a batcher. Imported by their names."""

import sys
import time
from typing import Any

from fast_batcher import Done, DynBatcher, InferenceModel, SteppedModel


class Doubler(InferenceModel[int, int]):
    def infer(self, inputs: list[int]) -> list[int]:
        return [2 * value for value in inputs]

    def warmup_inputs(self) -> list[int]:
        return [1]


class NeedsPath(Doubler):
    """Has an argument, so a batcher has to give it."""

    def __init__(self, path: str) -> None:
        self._path = path


class Sleeper(Doubler):
    """Takes the same time for any batch."""

    def infer(self, inputs: list[int]) -> list[int]:
        time.sleep(0.01)
        return inputs


class OnTheCpu(Doubler):
    """Loads PyTorch, and uses no GPU."""

    def __init__(self) -> None:
        import torch

        self._weight = torch.zeros(1)


class Prints(Doubler):
    def __init__(self) -> None:
        print("printed by the model", flush=True)  # noqa: T201  as models do


class Unspeakable(Doubler):
    def __init__(self) -> None:
        raise ValueError("\N{CJK UNIFIED IDEOGRAPH-6A21}")


class UpToSix(Doubler):
    """Fails for larger batches, which are then computed in parts."""

    def infer(self, inputs: list[int]) -> list[int]:
        if len(inputs) > 6:
            raise ValueError("more than six")
        return super().infer(inputs)

    def warmup_inputs(self) -> list[int]:
        return []  # a full warm-up batch would fail the start


class NoWeights(Doubler):
    def __init__(self) -> None:
        raise FileNotFoundError("weights.pt")


class TakesObjects(InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return [value.text for value in inputs]


class OneAnswer(InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs[:1]


batcher = DynBatcher(Doubler, max_batch_size=4)
text = "no model"

INPUTS = [1, 2, 3]


def print_inputs() -> list[int]:
    """Inputs, of a function that prints."""
    print("printed by the inputs")  # noqa: T201  as programs do
    return INPUTS


def leave() -> list[int]:
    """End the program."""
    sys.exit("no inputs")


def make_inputs() -> list[int]:
    """Inputs, as a function makes them."""
    return INPUTS


class Streams(SteppedModel[int, str]):
    """Answers so many chunks; a step takes 2 ms and 0.1 ms for each stream."""

    def join(self, inputs: list[int]) -> list[list[int]]:
        return [[length] for length in inputs]

    def step(self, states: list[list[int]]) -> list[str | Done[str]]:
        time.sleep(0.002 + 0.0001 * len(states))
        for state in states:
            state[0] -= 1
        return ["chunk" if state[0] else Done("chunk") for state in states]


named: DynBatcher[Any, Any] = DynBatcher("command_models:Streams", stepped=True)
LENGTHS = [5, 10, 15]
ONES = [1, 1]


class Erratic(InferenceModel[str, int]):
    """Takes far less time for batches of 8 than for smaller ones."""

    def infer(self, inputs: list[str]) -> list[int]:
        time.sleep(0.002 if len(inputs) == 8 else 0.02)
        return [*map(len, inputs)]


class Constant(InferenceModel[str, int]):
    """Takes the same time for any batch."""

    def infer(self, inputs: list[str]) -> list[int]:
        time.sleep(0.01)
        return [*map(len, inputs)]


class Linear(InferenceModel[str, int]):
    """Has a fixed time, and one for each input."""

    def infer(self, inputs: list[str]) -> list[int]:
        time.sleep(0.01 + 0.001 * len(inputs))
        return [*map(len, inputs)]


class Padded(InferenceModel[str, int]):
    """Computes each text at the length of the longest of its batch."""

    @staticmethod
    def cost(text: str) -> int:
        return len(text)

    def infer(self, inputs: list[str]) -> list[int]:
        time.sleep(0.01 + 1e-5 * len(inputs) * max(map(len, inputs)))
        return [*map(len, inputs)]


class Loop(InferenceModel[str, int]):
    """Computes one input after the other."""

    def infer(self, inputs: list[str]) -> list[int]:
        time.sleep(0.01 * len(inputs))
        return [*map(len, inputs)]


# Every tenth is long, at the same place of each ten.
TEXTS = [("x" * 1000 if number % 10 == 5 else "x" * 10) for number in range(100)]
