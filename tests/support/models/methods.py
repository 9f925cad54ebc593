"""Models with several methods."""

import time
from typing import Any

from fast_batcher import Collation, InferenceModel, batchable
from models.base import AtGate, pass_gate


class Both(InferenceModel[Any, tuple[str, int, Any]]):
    """Answers with the method, the size of the batch, and the input."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def infer(self, inputs: list[Any]) -> list[tuple[str, int, Any]]:
        return self._answer("infer", inputs)

    @batchable(max_batch_size=2)
    def text(self, inputs: list[Any]) -> list[tuple[str, int, Any]]:
        return self._answer("text", inputs)

    @batchable()
    def image(self, inputs: list[Any]) -> list[tuple[str, int, Any]]:
        if "bad" in inputs:
            raise ValueError("a bad image")
        return self._answer("image", inputs)

    def _answer(self, method: str, inputs: list[Any]) -> list[tuple[str, int, Any]]:
        time.sleep(self._seconds)
        return [(method, len(inputs), value) for value in inputs]


class MarkedInfer(InferenceModel[Any, Any]):
    """Its `infer` is batchable; answers with the sizes of all batches so far."""

    collation = Collation.stack(outputs="rows")

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def warmup_inputs(self) -> list[int]:
        return [1]

    @batchable(max_batch_size=2)
    def infer(self, batch: Any) -> Any:
        self._sizes.append(len(batch))
        return [" ".join(map(str, self._sizes)) for _ in batch]

    @batchable(max_batch_size=3)
    def miscounts(self, inputs: list[Any]) -> list[Any]:
        return inputs[1:]


class OnlyMethods(InferenceModel[Any, Any]):
    """Has no `infer`; one method takes arrays."""

    @batchable(collation=Collation.stack())
    def double(self, batch: Any) -> Any:
        return 2 * batch

    @batchable()
    def name(self, inputs: list[Any]) -> list[str]:
        return [type(one).__name__ for one in inputs]


class Holds(AtGate):
    """Has a method that waits at the gate with every batch, and answers with the whole batch."""

    @batchable()
    def hold(self, inputs: list[Any]) -> list[list[Any]]:
        pass_gate(self._gate)
        return [inputs for _ in inputs]
