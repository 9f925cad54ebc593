"""Models that want one batch instead of a list. Worker process.

Those that need PyTorch load it themselves: it takes seconds.
"""

import threading
import time
from typing import Any, ClassVar

import numpy as np

from fast_batcher import Collation, InferenceModel


class Doubles(InferenceModel[Any, Any]):
    collation = Collation.stack()

    def infer(self, inputs: Any) -> Any:
        assert isinstance(inputs, np.ndarray)
        return inputs * 2


class Keeps(InferenceModel[Any, Any]):
    collation = Collation.stack()

    def infer(self, inputs: Any) -> Any:
        return inputs


class Sequences(InferenceModel[Any, Any]):
    """Sums up what the mask shows of rows that are padded with 100."""

    collation = Collation.pad(value=100, side="left", mask="attention_mask")

    def infer(self, inputs: Any) -> Any:
        return (inputs["input_ids"] * inputs["attention_mask"]).sum(1)


class Trains(InferenceModel[Any, Any]):
    """Returns what still knows how it was computed."""

    collation = Collation.stack()

    def __init__(self) -> None:
        import torch

        self._weight = torch.nn.Parameter(torch.full((3,), 2.0))

    def infer(self, inputs: Any) -> Any:
        outputs = inputs * self._weight
        assert outputs.requires_grad
        return outputs


class OnGrad(InferenceModel[Any, Any]):
    """Tells whether its input asks for a gradient."""

    collation = Collation.stack()

    def infer(self, inputs: Any) -> Any:
        return [inputs.requires_grad] * len(inputs)


class Words(Keeps):
    collation = "stack"  # type: ignore[assignment]  # what it is about

    def infer(self, inputs: Any) -> Any:
        outputs = inputs["x"] + inputs["y"]
        return {"sum": outputs, "word": ["row"] * len(outputs)}


class Compiled(InferenceModel[Any, Any]):
    """Takes batches of 1, 4 and 16 rows without negative numbers."""

    collation = Collation.stack(allowed_batch_sizes=(1, 4, 16))

    def infer(self, inputs: Any) -> Any:
        assert len(inputs) in (1, 4, 16)
        if (inputs < 0).any():
            raise ValueError("negative")
        return inputs


class Noted(dict[str, Any]):
    """Features that note which thread has looked at which of them last."""

    threads: ClassVar[dict[str, int]] = {}

    def __getitem__(self, key: str) -> Any:
        Noted.threads[key] = threading.get_ident()
        return super().__getitem__(key)


class Notes(InferenceModel[Any, Any]):
    """Gives feature "in" back as "out"."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [Noted(out=row["in"]) for row in inputs]


class Compiles(InferenceModel[Any, Any]):
    """Takes half a second for each batch of a size that it has not seen, as a compiler does."""

    collation = Collation.stack(allowed_batch_sizes=(1, 4, 16))

    def __init__(self) -> None:
        self._sizes: set[int] = set()

    def infer(self, inputs: Any) -> Any:
        if len(inputs) not in self._sizes:
            self._sizes.add(len(inputs))
            time.sleep(0.5)
        return inputs

    def warmup_inputs(self) -> list[Any]:
        return [np.zeros(3)]


class FillsItself(InferenceModel[Any, Any]):
    """Computes 1, 4 or 16 inputs without a collation."""

    def __init__(self) -> None:
        self.allowed_batch_sizes = (16, 1, 4)

    def infer(self, inputs: list[Any]) -> list[Any]:
        assert len(inputs) <= 16
        return inputs

    def warmup_inputs(self) -> list[Any]:
        return [np.zeros(3)]


class SetsCollation(FillsItself):
    """Sets its collation in the constructor."""

    def __init__(self) -> None:
        self.collation = Collation.stack(allowed_batch_sizes=(1, 4, 16))

    def infer(self, inputs: Any) -> Any:
        assert inputs.shape in ((1, 3), (4, 3), (16, 3))
        return inputs


class SumsKinds(InferenceModel[Any, Any]):
    """Answers with the sums of the rows, computed by length, four at a time."""

    collation = Collation.stack(unequal="group", allowed_batch_sizes=(4,))

    def infer(self, inputs: Any) -> Any:
        return inputs.sum(axis=1)

    def warmup_inputs(self) -> list[Any]:
        return [np.ones(2)]


class CompilesShapes(InferenceModel[Any, Any]):
    """Takes half a second for each new shape; answers with the sums of the rows."""

    collation = Collation.pad(value=0, allowed_batch_sizes=(1, 8, 32), allowed_lengths=(4, 16))

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def warmup_inputs(self) -> list[Any]:
        return [np.ones(2)]

    def infer(self, inputs: Any) -> Any:
        if inputs.shape not in self._seen:
            self._seen.add(inputs.shape)
            time.sleep(0.5)
        return inputs.sum(axis=1)


class Ragged(InferenceModel[Any, Any]):
    """Answers with the length of an input, the positions of its batch, and its values."""

    collation = Collation.concatenate()

    def infer(self, inputs: Any) -> Any:
        values, offsets = inputs
        lengths = np.diff(offsets)
        return {"length": lengths, "total": np.full(len(lengths), len(values)), "values": values}

    def warmup_inputs(self) -> list[Any]:
        return [np.ones(3)]
