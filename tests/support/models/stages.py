"""Models with the stages `prepare` and `finish`."""

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from fast_batcher import Collation, InferenceModel, batchable
from models.base import AtGate, load_numpy, pass_gate


class InStages(AtGate):
    """Answers with the input and the size of the batch that `infer` got.

    An input such as "prepare waits" or "finish raises" says where something happens to it.
    """

    def prepare(self, value: str) -> tuple[str, str]:
        self._visit("prepare", value)
        return "prepared", value

    def infer(self, inputs: list[Any]) -> list[Any]:
        for state, value in inputs:
            assert state == "prepared"
            self._visit("infer", value)
        return [
            ValueError(value) if value == "infer rejects" else ("computed", value, len(inputs))
            for _, value in inputs
        ]

    def finish(self, output: tuple[str, str, int]) -> tuple[str, int]:
        state, value, size = output
        assert state == "computed"
        self._visit("finish", value)
        return value, size

    def _visit(self, stage: str, value: str) -> None:
        if value == f"{stage} waits":
            pass_gate(self._gate, value)
        elif value == f"{stage} raises":
            raise ValueError(value)
        elif value == f"{stage} breaks":
            raise RuntimeError("CUDA error: device-side assert triggered")
        elif value == f"{stage} dies":
            os._exit(3)


class InStagesWithMethod(InStages):
    @batchable()
    def measure(self, inputs: list[str]) -> list[int]:
        return [len(value) for value in inputs]


# The batches whose context is entered now.
entered: list[int] = []


class Entered(AbstractContextManager[None]):
    """Notes its batch while it is entered."""

    def __init__(self, batch_id: int) -> None:
        self._batch_id = batch_id

    def __enter__(self) -> None:
        entered.append(self._batch_id)

    def __exit__(self, *_: object) -> None:
        entered.remove(self._batch_id)


class SeesContexts(InStages):
    """Answers with the input and the batches whose contexts `infer` sees."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [(*output[:2], [*entered]) for output in super().infer(inputs)]


class Threads(InferenceModel[Any, list[str]]):
    """Answers with the names of the threads that ran its stages."""

    def prepare(self, value: Any) -> str:
        return threading.current_thread().name

    def infer(self, inputs: list[str]) -> list[list[str]]:
        return [[name, threading.current_thread().name] for name in inputs]

    def finish(self, output: list[str]) -> list[str]:
        return [*output, threading.current_thread().name]


class Reuses(AtGate):
    """Returns the same array for each batch; an input above 0 waits in `finish`."""

    def __init__(self, gate: str) -> None:
        super().__init__(gate)
        # Two axes: what is taken out of an array with one is a copy in any case.
        self._output = load_numpy().zeros((4, 1))

    def infer(self, inputs: list[int]) -> Any:
        self._output[: len(inputs), 0] = inputs
        return self._output[: len(inputs)]

    def finish(self, output: Any) -> float:
        if output[0] > 0:
            pass_gate(self._gate)
        return float(output[0])


class Halves(InferenceModel[Any, float]):
    """Prepares rows for a collation; takes large arrays."""

    collation = Collation.stack()

    def prepare(self, value: Any) -> Any:
        return value[::2]

    def infer(self, inputs: Any) -> Any:
        return inputs.sum(axis=1)


class WarmsUp(InferenceModel[str, tuple[int, int]]):
    """Counts what it has prepared and finished; the last example cannot be prepared if told so."""

    def __init__(self, last: str = "1") -> None:
        self._last = last
        self._counts: dict[str, int] = {"prepared": 0, "finished": 0}
        self._lock = threading.Lock()

    def _count(self, stage: str) -> int:
        with self._lock:
            self._counts[stage] += 1
            return self._counts[stage]

    def prepare(self, value: str) -> int:
        self._count("prepared")
        return int(value)

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [self._counts["prepared"] for _ in inputs]

    def finish(self, output: int) -> tuple[int, int]:
        return output, self._count("finished")

    def warmup_inputs(self) -> Sequence[str]:
        return ["1", self._last]
