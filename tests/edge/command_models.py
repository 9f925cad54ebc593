"""Models for the command `fast-batcher`, and a batcher. Imported by their names."""

import time
from typing import Any

from fast_batcher import DynBatcher, InferenceModel


class Doubler(InferenceModel[int, int]):
    def infer(self, inputs: list[int]) -> list[int]:
        return [2 * value for value in inputs]

    def warmup_inputs(self) -> list[int]:
        return [1]


class Sleeper(Doubler):
    """Takes the same time for any batch."""

    def infer(self, inputs: list[int]) -> list[int]:
        time.sleep(0.01)
        return inputs


class NoWeights(Doubler):
    def __init__(self) -> None:
        raise FileNotFoundError("weights.pt")


class OneAnswer(InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs[:1]


batcher = DynBatcher(Doubler, max_batch_size=4)
text = "no model"
