"""Adapter from a model that takes one batch to the interface with a list of inputs. Worker process.

Used for models with a `collation`; runs on the worker's main thread.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from fast_batcher._arrays.collation import Collation
from fast_batcher._arrays.joining import Row, describe_difference, join_apart, make_row, split
from fast_batcher.errors import CollationError, ConfigurationError, OutputMismatchError
from fast_batcher.model import MethodOptions, find_methods


def collate(model: Any) -> Any:
    """Return a model that takes and returns lists: the model itself if it declares no collation.

    Raises:
        ConfigurationError: The attribute `collation` is not a `Collation`.
    """
    collation = getattr(model, "collation", None)
    if collation is None:
        return model
    if not isinstance(collation, Collation):
        raise ConfigurationError(
            f"collation={collation!r:.100} of {type(model).__qualname__}: make one with "
            "Collation.stack() or Collation.pad()"
        )
    return CollatedModel(model, collation)


def collate_methods(model: Any) -> dict[str, Any]:
    """Return the model for each of its methods by name, as `collate` does; "infer" is the first."""
    marked = find_methods(model)
    own = marked.pop("infer", MethodOptions()).collation
    methods = {
        name: collate(OneMethod(getattr(model, name), options.collation))
        for name, options in marked.items()
    }
    return {"infer": collate(model) if own is None else CollatedModel(model, own), **methods}


class OneMethod:
    """A model whose `infer` is a method of another model.

    Args:
        infer: The method.
        collation: As for `InferenceModel`.
    """

    def __init__(self, infer: Callable[[Any], Any], collation: Collation | None) -> None:
        self.infer = infer
        self.collation = collation


class CollatedModel:
    """Model that joins inputs before `infer`, and splits its outputs.

    Args:
        model: The user's model, whose `infer` takes and returns batches.
        collation: Rules that join inputs and split outputs.
    """

    def __init__(self, model: Any, collation: Collation) -> None:
        self._model = model
        self._collation = collation

    def warmup_inputs(self) -> list[Any]:
        """Return the model's examples, each a row as a caller sends it."""
        warmup_inputs = getattr(self._model, "warmup_inputs", None)
        return [] if warmup_inputs is None else list(warmup_inputs())

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Compute inputs in one or more calls of the model.

        Returns:
            One output per input. The output is an error for an input that cannot be joined, for an
            input that differs from most of the others, and for every input of a call that did not
            return rows.

        Raises:
            CollationError: The inputs differ, and no kind of them is more than half.
            Exception: Any exception of the model.
        """
        outcomes: list[Any] = [None] * len(inputs)
        rows: dict[int, Row] = {}
        for position, value in enumerate(inputs):
            try:
                rows[position] = make_row(value, self._collation)
            except CollationError as error:
                outcomes[position] = error
        calls = list(self._divide(rows, outcomes))
        for positions in calls:
            computed = self._infer_rows([rows[position] for position in positions])
            if len(calls) > 1:
                # The next call may return its outputs in the same memory.
                computed = copy.deepcopy(computed)
            for position, outcome in zip(positions, computed, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _divide(self, rows: dict[int, Row], outcomes: list[Any]) -> Iterator[list[int]]:
        """Yield the positions of each call's inputs; set errors for inputs that no call gets."""
        groups: dict[Any, list[int]] = {}
        for position, row in rows.items():
            groups.setdefault(row.signature, []).append(position)
        kinds = list(groups.values())
        if len(kinds) > 1 and self._collation.unequal == "error":
            kinds.sort(key=len, reverse=True)
            most, *others = kinds
            if 2 * len(most) <= len(rows):  # no majority, so no input is known to be the wrong one
                raise self._difference(rows, most, others[0])
            for few in others:
                for position in few:
                    outcomes[position] = self._difference(rows, most, few)
            kinds = [most]
        allowed = self._collation.allowed_batch_sizes
        for positions in kinds:
            step = max(allowed, default=len(positions))
            for start in range(0, len(positions), step):
                yield positions[start : start + step]

    def _difference(self, rows: dict[int, Row], most: list[int], few: list[int]) -> CollationError:
        difference = describe_difference(rows[most[0]], rows[few[0]])
        return CollationError(f"{difference}; send inputs of one kind, or use unequal='group'")

    def _infer_rows(self, rows: list[Row]) -> list[Any]:
        """Return the outputs of one call."""
        count = len(rows)
        sizes = self._collation.allowed_batch_sizes
        size = next((allowed for allowed in sizes if allowed >= count), count)
        batch = join_apart([*rows, *[rows[-1]] * (size - count)], self._collation)
        outputs = self._model.infer(batch)
        try:
            return split(outputs, size, self._collation, to_cpu=True)[:count]
        except OutputMismatchError as error:
            # A retry with fewer inputs cannot succeed.
            return [error] * count
