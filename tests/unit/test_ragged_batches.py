"""Inputs of unequal lengths that are joined end to end, and outputs that are split by offsets."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from models.collated import Ragged
from waits import assert_balance, call, outcome

from fast_batcher import (
    Collation,
    CollationError,
    ConfigurationError,
    DynBatcher,
    InferenceModel,
    OutputMismatchError,
    RequestTooLargeError,
)
from fast_batcher._worker.model import CollatedModel, warm_up
from fast_batcher.model import find_cost


class Recorder:
    """Remembers the batches that it was given."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.batches: list[Any] = []
        self._answer = answer

    def infer(self, batch: Any) -> Any:
        self.batches.append(batch)
        return self._answer(batch)


def compute(
    answer: Callable[[Any], Any], *inputs: Any, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Return the outputs, and the batches that the model was given."""
    recorder = Recorder(answer)
    model = CollatedModel(recorder, Collation.concatenate(**options))
    return model.infer(list(inputs)), recorder.batches


def first(batch: Any) -> Any:
    return batch[0]


class Pair(NamedTuple):
    ids: Any
    weight: Any


@dataclass
class Text:
    ids: Any
    name: str


def ids(*values: int) -> Any:
    return np.array(values, "i8")


# What the model is given.


@pytest.mark.parametrize(
    ("inputs", "batch", "offsets"),
    [
        ([ids(1, 2, 3), ids(4)], ids(1, 2, 3, 4), [0, 3, 4]),
        ([ids(1, 2)], ids(1, 2), [0, 2]),
        ([ids(), ids(1, 2), ids()], ids(1, 2), [0, 0, 2, 2]),
        ([np.ones((2, 3), "f2"), np.zeros((1, 3), "f2")], np.eye(3, dtype="f2"), [0, 2, 3]),
        ([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], torch.tensor([1.0, 2, 3]), [0, 1, 3]),
        ([np.array([1, 2], ">i4"), np.array([3], ">i4")], np.array([1, 2, 3], ">i4"), [0, 2, 3]),
    ],
)
def test_arrays_are_joined_with_their_offsets(
    inputs: list[Any], batch: Any, offsets: list[int]
) -> None:
    _, [(values, found)] = compute(first, *inputs)
    assert type(values) is type(batch)
    assert (values.shape, values.dtype) == (batch.shape, batch.dtype)
    assert type(found) is type(batch)
    assert str(found.dtype).endswith("int32")
    assert found.tolist() == offsets
    if batch.ndim == 1:
        assert values.tolist() == batch.tolist()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_mapping_gets_its_offsets_by_name(kind: Any) -> None:
    rows = [
        kind(input_ids=ids(1, 2), positions=ids(0, 1), weight=0.5, label="a", style=np.float32(1)),
        kind(input_ids=ids(3), positions=ids(0), weight=1.5, label="b", style=np.float32(2)),
    ]
    outputs, [batch] = compute(lambda one: one["weight"], *rows, lengths="offsets")
    assert type(batch) is kind
    assert [*batch] == ["input_ids", "positions", "weight", "label", "style", "offsets"]
    assert batch["input_ids"].tolist() == [1, 2, 3]
    assert batch["positions"].tolist() == [0, 1, 0]
    assert batch["style"].tolist() == [1, 2]
    assert (batch["weight"].tolist(), batch["label"]) == ([0.5, 1.5], ["a", "b"])
    assert batch["offsets"].tolist() == [0, 2, 3]
    assert outputs == [0.5, 1.5]


@pytest.mark.parametrize(
    ("rows", "batch"),
    [
        ([(ids(1, 2), 0.5), (ids(3), 1.5)], (ids(1, 2, 3), [0.5, 1.5])),
        ([Pair(ids(1, 2), 5), Pair(ids(3), 6)], Pair(ids(1, 2, 3), [5, 6])),
    ],
)
def test_other_structures_come_with_their_offsets(rows: list[Any], batch: Any) -> None:
    _, [(found, offsets)] = compute(lambda one: one[0][0], *rows)
    assert type(found) is type(batch)
    assert [part.tolist() for part in found] == [batch[0].tolist(), batch[1]]
    assert offsets.tolist() == [0, 2, 3]


def test_dataclass_comes_with_its_offsets() -> None:
    _, [(found, offsets)] = compute(lambda one: one[0].ids, Text(ids(1, 2), "a"), Text(ids(3), "b"))
    assert (found.ids.tolist(), found.name, offsets.tolist()) == ([1, 2, 3], ["a", "b"], [0, 2, 3])


# Outputs.


def per_position(batch: Any) -> Any:
    return batch[0] * 10


def per_row(batch: Any) -> Any:
    values, offsets = batch
    return np.array([values[start:end].sum() for start, end in pairwise(offsets)])


def both(batch: Any) -> Any:
    return {"each": per_position(batch), "sum": per_row(batch), "none": None}


@pytest.mark.parametrize(
    "inputs",
    [
        [[1, 2, 3], [4]],
        # As many positions as rows.
        [[1], [2], [3]],
        [[7]],
        [[1, 2], []],
        [[], [1, 2, 3], []],
        [[], []],
        [[]],
        [[1, 2]],
    ],
)
def test_outputs_are_split_by_row_or_by_offsets(inputs: list[list[int]]) -> None:
    """In every batch in the same way, however many positions its rows have."""
    rows = [ids(*values) for values in inputs]
    expected = [[10 * value for value in values] for values in inputs]
    outputs, _ = compute(per_position, *rows)
    assert [one.tolist() for one in outputs] == expected
    outputs, _ = compute(per_row, *rows)
    assert outputs == [sum(values) for values in inputs]
    outputs, _ = compute(both, *rows)
    assert [one["each"].tolist() for one in outputs] == expected
    assert [one["sum"] for one in outputs] == [sum(values) for values in inputs]
    outputs, _ = compute(lambda batch: list(per_row(batch)), *rows)
    assert outputs == [sum(values) for values in inputs]


def test_tensors_are_split_into_copies() -> None:
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    outputs, _ = compute(lambda batch: batch[0].requires_grad_() * 2, *rows)
    assert [one.tolist() for one in outputs] == [[2, 4], [6]]
    assert [one.untyped_storage().nbytes() for one in outputs] == [8, 4]
    assert not any(one.requires_grad for one in outputs)


def test_outputs_of_a_thread_are_copies() -> None:
    recorder = Recorder(first)
    model = CollatedModel(recorder, Collation.concatenate(), copies=True)
    outputs = model.infer([ids(1, 2), ids(3)])
    recorder.batches[0][0][:] = 0
    assert [one.tolist() for one in outputs] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda batch: batch[0][:-1],
            "has 4 rows for 2 inputs; return one for each, or one for each of their 5 positions",
        ),
        (lambda batch: [1, 2, 3], "has 3 rows for 2 inputs"),
        (lambda batch: 5, "is a int for 2 inputs"),
    ],
)
def test_output_of_another_length_is_an_error(answer: Any, message: str) -> None:
    outputs, _ = compute(answer, ids(1, 2, 3), ids(4, 5))
    assert all(isinstance(one, OutputMismatchError) for one in outputs)
    assert message in str(outputs[0])


# Inputs that cannot be joined.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": ids(1), "y": ids(1, 2)}, "their lengths differ: 'x' 1, 'y' 2"),
        ({"x": 1.0}, "this input has no array with an axis"),
        ("text", "this input has no array with an axis"),
        ({"x": ids(1), "cu_seqlens": ids(1)}, "the input has this key already"),
    ],
)
def test_wrong_input_fails_alone(wrong: Any, message: str) -> None:
    good = {"x": ids(1, 2)}
    outputs, _ = compute(lambda batch: batch["x"], good, wrong, good)
    assert [one.tolist() for one in (outputs[0], outputs[2])] == [[1, 2], [1, 2]]
    assert isinstance(outputs[1], CollationError)
    assert message in str(outputs[1])


def test_rows_of_other_shapes_are_other_kinds() -> None:
    rows = [np.ones((2, 3)), np.ones((1, 3)), np.ones((2, 4))]
    outputs, _ = compute(first, *rows)
    assert "shape (any, 3) and dtype float64 and an array of shape (any, 4)" in str(outputs[2])
    outputs, batches = compute(first, *rows, unequal="group")
    assert [one.shape for one in outputs] == [(2, 3), (1, 3), (2, 4)]
    assert len(batches) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": None}, "lengths=None: give a name"),
        ({"lengths": ""}, "lengths='': give a name"),
        ({"lengths": 5}, "lengths=5: give a name"),
        ({"outputs": "offsets"}, "outputs='offsets': choose one of"),
    ],
)
def test_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Collation.concatenate(**arguments)
    assert message in str(caught.value)


# In a batcher.


class Cheap(InferenceModel[Any, Any]):
    collation = Collation.concatenate()

    def infer(self, inputs: Any) -> Any:
        return inputs[0]

    @staticmethod
    def cost(value: Any) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("value", "cost"),
    [
        (ids(1, 2, 3), 3),
        ({"label": "a", "weight": 1.5, "x": torch.zeros(4, 2), "y": ids(1, 2, 3, 4)}, 4),
        (ids(), 1),
        ("text", 1),
        (None, 1),
    ],
)
def test_default_cost_is_the_length(value: Any, cost: float) -> None:
    found = find_cost(Ragged)
    assert found is not None
    assert found(value) == cost
    assert find_cost(Cheap) is Cheap.cost
    assert find_cost("models.collated:Ragged") is None


def test_warm_up_computes_full_batches() -> None:
    recorder = Recorder(first)
    recorder.warmup_inputs = lambda: [ids(1), ids(1, 2)]  # type: ignore[attr-defined]
    times = warm_up(CollatedModel(recorder, Collation.concatenate()), 4)
    assert [size for size, _ in times] == [1, 4]
    assert {offsets.tolist()[-1] for _, offsets in recorder.batches} == {3, 6}


@pytest.mark.slow
@pytest.mark.anyio
async def test_max_batch_cost_limits_the_joined_length() -> None:
    async with DynBatcher(Ragged, 4, max_batch_cost=8, max_request_cost=10) as batcher:
        assert batcher.settings["cost_is_padded"].value is False
        calls = [call(batcher, np.full(length, 1.0)) for length in (5, 4, 3, 1)]
        answers = [await outcome(one) for one in calls]
        for answer, length in zip(answers, (5, 4, 3, 1), strict=True):
            assert len(answer["values"]) == answer["length"] == length
        assert max(answer["total"] for answer in answers) == 8
        too_long = await outcome(call(batcher, np.ones(11)))
        assert isinstance(too_long, RequestTooLargeError)
        with pytest.raises(ConfigurationError, match="make one with"):
            await batcher.process_rows(np.ones((2, 2)), collation=Collation.concatenate())
        ones = await asyncio.gather(*[call(batcher, np.ones(1)) for _ in range(9)])
        assert [one["values"].tolist() for one in ones] == [[1.0]] * 9
    assert_balance(batcher)
