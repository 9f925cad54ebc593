"""Inputs and outputs of a model with a collation.

The calls of the model are looked at here; real workers with such models are at the end.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.collated import (
    Compiled,
    CompilesShapes,
    Doubles,
    Keeps,
    Noted,
    Notes,
    OnGrad,
    Sequences,
    Trains,
    Words,
)
from waits import ONE_LOOP, assert_balance, call, outcome, turns

from fast_batcher import (
    Collation,
    CollationError,
    ConfigurationError,
    DynBatcher,
    InferenceError,
    OutputMismatchError,
)
from fast_batcher._worker.model import CollatedModel, collate_methods, warm_up


class Recorder:
    """Remembers the batches that it was given."""

    def __init__(self, answer: Callable[[Any], Any] = lambda batch: batch) -> None:
        self.batches: list[Any] = []
        self._answer = answer

    def infer(self, batch: Any) -> Any:
        self.batches.append(batch)
        return self._answer(batch)


def compute(recorder: Recorder, collation: Collation, *inputs: Any) -> list[Any]:
    return CollatedModel(recorder, collation).infer(list(inputs))


def row(length: int = 3, dtype: str = "f4") -> Any:
    return np.arange(length).astype(dtype)


# What the model is given.


@pytest.mark.parametrize(("length", "filled"), [(3, 8), (8, 8), (9, 32), (40, 40)])
def test_batches_are_filled_to_an_allowed_length(length: int, filled: int) -> None:
    recorder = Recorder()
    padded = Collation.pad(value=-1, mask="mask", allowed_lengths=(32, 8))
    compute(recorder, padded, {"x": row(length)}, {"x": row(2)}, {"x": row(length)})
    (batch,) = recorder.batches
    assert batch["x"].shape == batch["mask"].shape == (3, filled)
    assert batch["mask"].sum(axis=1).tolist() == [length, 2, length]
    assert (batch["x"][1, 2:] == -1).all()


def test_rows_of_one_array_are_filled_too() -> None:
    recorder = Recorder()
    compute(recorder, Collation.pad(value=0, allowed_lengths=(8,)), *np.ones((4, 5)))
    assert recorder.batches[0].shape == (4, 8)


def test_warm_up_computes_each_allowed_length_with_each_size() -> None:
    recorder = Recorder(lambda batch: batch.sum(axis=1))
    collation = Collation.pad(value=0, allowed_batch_sizes=(1, 4), allowed_lengths=(8, 32))
    recorder.warmup_inputs = lambda: [row(12), row(3)]  # type: ignore[attr-defined]
    model = CollatedModel(recorder, collation)
    times = warm_up(model, 4, (1, 4))
    assert [size for size, _ in times] == [1, 4]
    assert {batch.shape for batch in recorder.batches} == {(1, 8), (4, 8), (1, 32), (4, 32)}
    # Afterwards batches are as long as their inputs need.
    model.infer([row(3)])
    assert recorder.batches[-1].shape == (1, 8)


@pytest.mark.parametrize(
    ("lengths", "is_complete"), [((8, 32), True), ((1, 2, 4, 8), True), (range(4, 36, 4), False)]
)
def test_warm_up_computes_combinations_of_lengths(
    lengths: Sequence[int], is_complete: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At most 64 shapes: of 8 lengths of two axes the equal ones alone, with each of two sizes."""
    recorder = Recorder(lambda batch: batch.sum(axis=(1, 2)))
    collation = Collation.pad(value=0, dims=(0, -1), allowed_lengths=lengths)
    recorder.warmup_inputs = lambda: [np.ones((1, 1))]  # type: ignore[attr-defined]
    model = CollatedModel(recorder, collation)
    warm_up(model, 4)
    pairs = [*product(lengths, repeat=2)] if is_complete else [*zip(lengths, lengths, strict=True)]
    assert {batch.shape for batch in recorder.batches} == {
        (n, *pair) for n in (1, 4) for pair in pairs
    }
    missing = "the warm-up computes 8 equal lengths of the padded axes, and not all 128 shapes"
    assert (missing in caplog.text) != is_complete
    model.infer([np.ones((1, 5))])
    assert recorder.batches[-1].shape == (1, lengths[0], 8)


def test_warm_up_computes_lengths_with_all_stages() -> None:
    recorder = Recorder(lambda batch: batch.sum(axis=1))
    recorder.warmup_inputs = lambda: [3]  # type: ignore[attr-defined]
    model = CollatedModel(recorder, Collation.pad(value=0, allowed_lengths=(8, 32)))
    warm_up(model, 2, infer=lambda inputs: model.infer([np.ones(length) for length in inputs]))
    assert {batch.shape for batch in recorder.batches} == {(1, 8), (2, 8), (1, 32), (2, 32)}


def test_the_model_is_given_one_batch() -> None:
    recorder = Recorder()
    first, second = compute(recorder, Collation.stack(), row(), row() + 1)
    (batch,) = recorder.batches
    assert batch.shape == (2, 3)
    assert batch.dtype == np.float32
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [1, 2, 3]


def test_a_batch_is_a_copy_of_its_inputs() -> None:
    def spoil(batch: Any) -> Any:
        batch[:] = -1
        return batch

    value = row()
    compute(Recorder(spoil), Collation.stack(), value)
    assert value.tolist() == [0, 1, 2]


def test_a_model_without_a_collation_is_left_alone() -> None:
    recorder = Recorder()
    assert collate_methods(recorder) == {"infer": recorder}


def test_invalid_collation_is_named() -> None:
    recorder: Any = Recorder()
    recorder.collation = "stack"
    with pytest.raises(ConfigurationError, match="collation='stack' of Recorder: make one with"):
        collate_methods(recorder)


def test_sizes_beside_a_collation_are_rejected() -> None:
    """A class is checked in the app; `__init__` and `batchable` set these in the worker only."""
    recorder: Any = Recorder()
    recorder.allowed_batch_sizes = (1, 4)
    assert collate_methods(recorder) == {"infer": recorder}
    recorder.collation = Collation.stack()
    with pytest.raises(
        ConfigurationError, match=r"allowed_batch_sizes=\(1, 4\) of Recorder: it has"
    ):
        collate_methods(recorder)


# Unequal inputs.


def test_unjoinable_row_fails_alone() -> None:
    recorder = Recorder()
    outcomes = compute(recorder, Collation.stack(), row(), [1, 2], row(), np.array([{}]))
    assert [isinstance(one, CollationError) for one in outcomes] == [False, True, False, True]
    (outcome,) = compute(recorder, Collation.stack(), object())
    assert isinstance(outcome, CollationError)
    assert [batch.shape for batch in recorder.batches] == [(2, 3)]


@pytest.mark.parametrize(
    "other", [row(4), row(dtype="f8"), {"x": row()}, torch.zeros(3), row()[None], 1.0]
)
def test_different_row_fails_alone(other: Any) -> None:
    recorder = Recorder()
    first, fault, second = compute(recorder, Collation.stack(), row(), other, row())
    assert isinstance(fault, CollationError)
    assert "cannot be joined" in str(fault)
    assert first.dtype == second.dtype == np.float32
    assert len(recorder.batches) == 1


def test_batch_without_majority_kind_fails() -> None:
    recorder = Recorder()
    with pytest.raises(CollationError, match=r"see Collation\.pad; send .* use unequal='group'"):
        compute(recorder, Collation.stack(), row(3), row(4))
    with pytest.raises(CollationError):
        compute(recorder, Collation.stack(), row(3), row(3), row(4), row(5))
    assert recorder.batches == []


def test_groups_are_computed_separately_in_order() -> None:
    recorder = Recorder(lambda batch: batch * 2)
    lengths = [3, 4, 3, 5, 4, 3]
    inputs = [row(length) + number for number, length in enumerate(lengths)]
    outcomes = compute(recorder, Collation.stack(unequal="group"), *inputs)
    assert [batch.shape for batch in recorder.batches] == [(3, 3), (2, 4), (1, 5)]
    for value, found in zip(inputs, outcomes, strict=True):
        assert np.array_equal(value * 2, found)


# Sizes of a compiled model.


@given(count=st.integers(1, 8), sizes=st.sets(st.integers(1, 8), max_size=3))
def test_only_allowed_sizes_reach_the_model(count: int, sizes: set[int]) -> None:
    """The scheduler makes no batch that is larger than all of them."""
    sizes.add(8)
    recorder = Recorder(lambda batch: batch + 1)
    inputs = [np.array([number]) for number in range(count)]
    collation = Collation.stack(allowed_batch_sizes=sorted(sizes))
    outcomes = compute(recorder, collation, *inputs)
    assert [int(one[0]) for one in outcomes] == list(range(1, count + 1))
    assert {len(batch) for batch in recorder.batches} <= sizes
    seen = [number for batch in recorder.batches for number in batch[:, 0].tolist()]
    assert set(seen) == set(range(count))
    # Only the last batch is filled up, with its last row.
    assert seen == sorted(seen)
    assert seen[count:] == [count - 1] * (len(seen) - count)


@pytest.mark.parametrize(
    ("collation", "lengths", "elements"),
    [
        # 2 + 2 + 3 of 4 x 2 and 4 x 3.
        (Collation.stack(unequal="group", allowed_batch_sizes=(4,)), (2, 3, 2), (7, 20)),
        (Collation.pad(value=0, allowed_lengths=(4,)), (2, 3, 2), (7, 12)),
        (Collation.pad(value=0), (2, 3, 2), (7, 9)),
        (Collation.pad(value=0, allowed_batch_sizes=(1, 4), allowed_lengths=(8,)), (1, 2), (3, 32)),
        (Collation.pad(value=0, allowed_lengths=(4,)), (0,), (0, 4)),
        (Collation.stack(), (2, 2), (0, 0)),
    ],
)
def test_elements_of_inputs_and_batches_are_counted(
    collation: Collation, lengths: Sequence[int], elements: tuple[int, int]
) -> None:
    model = CollatedModel(Recorder(), collation)
    model.infer([row(length) for length in lengths])
    assert model.elements == elements


def test_elements_of_all_features_are_counted() -> None:
    """The mask is a feature; a number and a text are one element of their row."""
    model = CollatedModel(Recorder(), Collation.pad(value=0, mask="mask", allowed_lengths=(4,)))
    model.infer([{"x": row(length), "number": 1.5, "text": "a", "none": None} for length in (1, 2)])
    assert model.elements == (3 + 3 + 2 + 2, 8 + 8 + 2 + 2)


# What the model returns.


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda batch: batch[:-1], "the output has 1 rows for 2 inputs"),
        (lambda batch: None, "the output is a NoneType for 2 inputs"),
        (lambda batch: (one for one in batch), "the output is a generator for 2 inputs"),
        (lambda batch: "ab", "the output is a str for 2 inputs"),
        (lambda batch: batch.sum(), "the output has 0 axes"),
        (lambda batch: {"a": batch, "b": batch[0]}, "output 'b' has 3 rows for 2 inputs"),
        (lambda batch: {"a": batch, "b": 1.0}, "output 'b' is a float for 2 inputs"),
        (lambda batch: [batch, batch], "the output is a list of 2, which could be"),
        (lambda batch: (batch, None), "the output is a tuple of 2, which could be"),
        (lambda batch: (batch, ["x", "y"]), "the output is a tuple of 2, which could be"),
        (lambda batch: np.ma.masked_array(batch), "the output is a MaskedArray"),
        (lambda batch: torch.eye(2).to_sparse(), "the output is a Tensor"),
        (lambda batch: {1, 2}, "the output is a set"),
    ],
)
def test_output_without_rows_fails_every_input(answer: Callable[[Any], Any], message: str) -> None:
    for fault in compute(Recorder(answer), Collation.stack(), row(), row()):
        assert isinstance(fault, OutputMismatchError)
        assert message in str(fault)


@pytest.mark.parametrize(
    ("answer", "outputs", "expected"),
    [
        (lambda batch: ["x", "y"], "auto", ["x", "y"]),
        (lambda batch: [1.5, None], "auto", [1.5, None]),
        (lambda batch: [{"score": 1}, {"score": 2}], "auto", [{"score": 1}, {"score": 2}]),
        (lambda batch: (np.float32(1), np.float32(2)), "auto", [1.0, 2.0]),
        (lambda batch: [batch, batch], "several", [[0.0, 0.0], [1.0, 1.0]]),
        (lambda batch: (batch, ["x", "y"]), "several", [(0.0, "x"), (1.0, "y")]),
        (lambda batch: [batch, (batch, batch)], "several", [[0.0, (0.0, 0.0)], [1.0, (1.0, 1.0)]]),
        (lambda batch: {"a": batch, "b": None}, "auto", [{"a": 0, "b": None}, {"a": 1, "b": None}]),
        (lambda batch: {"a": ["x", "y"]}, "auto", [{"a": "x"}, {"a": "y"}]),
        (lambda batch: {"a": {"b": batch}}, "auto", [{"a": {"b": 0.0}}, {"a": {"b": 1.0}}]),
        (lambda batch: [[1, 2], [3, 4]], "rows", [[1, 2], [3, 4]]),
    ],
)
def test_rows_are_read_from_outputs(
    answer: Callable[[Any], Any], outputs: Any, expected: list[Any]
) -> None:
    collation = Collation.stack(outputs=outputs)
    assert compute(Recorder(answer), collation, 0.0, 1.0) == expected


def test_exception_as_output_row_fails_that_row() -> None:
    fault = ValueError("no")
    found = compute(Recorder(lambda batch: [batch[0], fault]), Collation.stack(), row(), row())
    assert found[0].tolist() == [0, 1, 2]
    assert found[1] is fault


# With real workers.

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """One loop: what is joined and split does not depend on it."""
    return ONE_LOOP


@pytest.mark.slow  # the worker loads PyTorch
async def test_a_worker_pads_and_masks() -> None:
    async with DynBatcher(Sequences) as batcher:
        texts = [torch.arange(length) for length in (1, 5, 3)]
        calls = [call(batcher, {"input_ids": text}) for text in texts]
        assert [int(await outcome(task)) for task in calls] == [0, 10, 3]


@pytest.mark.slow  # the worker loads PyTorch
async def test_gradients_stay_in_the_worker() -> None:
    async with DynBatcher(Trains) as batcher:
        found = await batcher.process_batched(torch.ones(3, requires_grad=True))
        assert found.tolist() == [2.0, 2.0, 2.0]
        assert not found.requires_grad
    async with DynBatcher(OnGrad) as batcher:
        assert await batcher.process_batched(torch.ones(3, requires_grad=True)) is False


@pytest.mark.slow
async def test_batch_with_unknown_culprit_is_divided() -> None:
    async with DynBatcher(Doubles, policy="fixed", max_delay=20, max_batch_size=4) as batcher:
        calls = [call(batcher, row(length)) for length in (2, 2, 3, 3)]
        assert [len(await outcome(task)) for task in calls] == [2, 2, 3, 3]
    async with DynBatcher(
        Doubles, policy="fixed", max_delay=20, max_batch_size=2, isolate_errors=False
    ) as batcher:
        calls = [call(batcher, row(length)) for length in (2, 3)]
        for task in calls:
            assert isinstance(await outcome(task), CollationError)


async def test_class_with_invalid_collation_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="its collation is 'stack'; make one with"):
        DynBatcher(Words)


# Inputs that are batches.


@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 3, 32])
async def test_batch_of_rows_spans_several_batches(max_batch_size: int) -> None:
    async with DynBatcher(Keeps, max_batch_size=max_batch_size) as batcher:
        whole = np.arange(20, dtype="f4").reshape(10, 2)
        views = [whole, whole[::-1], whole[:, ::-1], whole[2:5]]
        found = await asyncio.gather(*[batcher.process_rows(view) for view in views])
        for view, one in zip(views, found, strict=True):
            assert one.dtype == np.float32
            assert np.array_equal(one, view)
        stats = assert_balance(batcher)
        assert stats.completed == 33
        assert max(stats.batch_sizes) <= max_batch_size


@pytest.mark.slow
async def test_rows_of_several_callers_share_batches() -> None:
    async with DynBatcher(Keeps, policy="fixed", max_delay=20, max_batch_size=6) as batcher:
        many = asyncio.ensure_future(batcher.process_rows(np.arange(4.0)[:, None]))
        await turns()
        one, other = call(batcher, np.zeros(1)), call(batcher, np.ones(1))
        assert (await many).flatten().tolist() == [0, 1, 2, 3]
        assert [(await outcome(one)).tolist(), (await outcome(other)).tolist()] == [[0], [1]]
        assert batcher.stats.batch_sizes == {6: 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros((0, 3)), "a batch without rows"),
        ([], "a batch without rows"),
        (np.float32(1), "has no batch axis 0"),
        ({"x": np.zeros((2, 3)), "y": np.zeros((3, 3))}, "different numbers|numbers of rows"),
        ({"x": 1.0}, "'x' of the input, a float, has no batch axis"),
        ("text", "has no batch axis"),
        ({}, "not a batch"),
    ],
)
async def test_invalid_batch_of_rows_is_rejected_unqueued(batch: Any, message: str) -> None:
    async with DynBatcher(Keeps) as batcher:
        with pytest.raises(CollationError, match=message):
            await batcher.process_rows(batch)
        with pytest.raises(ConfigurationError, match="collation=0: make one with"):
            await batcher.process_rows(np.zeros((1, 1)), collation=0)  # type: ignore[arg-type]
        assert batcher.stats.submitted == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "is_large"),
    [((3, 10), False), ((3, 2**20), True), ((1001, 1), True)],
    ids=["small", "bytes", "rows"],
)
async def test_thread_splits_and_joins_large_batches(
    shape: tuple[int, int], is_large: bool
) -> None:
    here = threading.get_ident()
    batch = Noted({"in": np.arange(shape[0] * shape[1], dtype="i4").reshape(shape)})
    async with DynBatcher(Notes) as batcher:
        found = await batcher.process_rows(batch)
    assert {name: where != here for name, where in Noted.threads.items()} == {
        "in": is_large,
        "out": is_large,
    }
    assert np.array_equal(found["out"], batch["in"])


@pytest.mark.slow
async def test_bad_row_fails_only_its_input() -> None:
    async with DynBatcher(Compiled) as batcher:
        other = call(batcher, np.array([5.0]))
        with pytest.raises(InferenceError, match="negative"):
            await batcher.process_rows(np.array([[1.0], [-1.0], [2.0]]))
        assert (await outcome(other)).tolist() == [5.0]
        assert_balance(batcher)


@pytest.mark.slow
@pytest.mark.anyio
async def test_no_call_waits_for_a_shape_to_compile() -> None:
    """A batch of a new shape would be longer than `infer_timeout`, and its worker be replaced."""
    rng = np.random.default_rng(1)
    async with DynBatcher(CompilesShapes, 32, infer_timeout=0.3) as batcher:
        for count in (1, 2, 5, 8, 9, 31, 32, 33):
            rows = [np.ones(rng.integers(1, 17)) for _ in range(count)]
            assert await batcher.process_many(rows) == [len(row) for row in rows]
        assert batcher.stats.restarts == 0
