"""Warm-up before the worker is ready, and its report; in this process."""

import io
from typing import Any

import pytest
from models.base import Echo
from models.loading import RaisesOnWarmUp, WarmsUpBadly
from models.ordinary import Warm

from fast_batcher._worker.model import warm_up
from fast_batcher.errors import WorkerStartupError


class Sizes(Echo):
    """Knows what it was given."""

    def __init__(self, *inputs: Any, most: int = 1000) -> None:
        self.inputs = inputs
        self.most = most
        self.seen: list[list[Any]] = []

    def infer(self, inputs: list[Any]) -> list[Any]:
        if len(inputs) > self.most:
            raise MemoryError("too large")
        self.seen.append(inputs)
        return inputs

    def warmup_inputs(self) -> tuple[Any, ...]:
        return self.inputs


def test_one_input_and_full_batch_run_twice() -> None:
    model = Sizes("a", "b")
    times = warm_up(model, 3)
    assert model.seen == [["a"], ["a"], ["a", "b", "a"], ["a", "b", "a"]]
    assert [size for size, _ in times] == [1, 3]
    assert all(seconds >= 0 for _, seconds in times)


def test_warm_up_computes_every_input() -> None:
    model = Sizes("a", "b", "c")
    assert [size for size, _ in warm_up(model, 2)] == [1, 2]
    assert model.seen == [["a"], ["a"], ["a", "b"], ["c", "a"], ["a", "b"]]


def test_warm_up_without_batching_computes_every_input() -> None:
    model = Sizes("a", "b")
    assert [size for size, _ in warm_up(model, 1)] == [1]
    assert model.seen == [["a"], ["b"], ["a"]]


def test_warm_up_computes_every_allowed_size() -> None:
    """A compiled model would compile the others when the first request needs them."""
    model = Sizes("a", "b")
    times = warm_up(model, 6, (2, 4, 8))
    assert [size for size, _ in times] == [1, 2, 4, 6]
    assert [len(inputs) for inputs in model.seen] == [1, 1, 2, 2, 4, 4, 6, 6]
    assert [size for size, _ in warm_up(model, 6, (2, 4))] == [1, 2, 4]
    few = Sizes("a", most=3)
    assert [size for size, _ in warm_up(few, 6, (2, 4, 8))] == [1, 2]


def test_warm_up_without_inputs_reports_nothing() -> None:
    class Plain:
        def infer(self, inputs: list[Any]) -> list[Any]:
            raise AssertionError("it has no inputs")

    assert warm_up(Plain(), 4) == []
    assert warm_up(Warm([]), 4) == []


def test_worker_starts_if_full_batch_is_too_large() -> None:
    """Requests may never fill one, and batches become smaller if they do."""
    assert [size for size, _ in warm_up(Sizes("a", most=2), 8)] == [1]
    with pytest.raises(WorkerStartupError, match="MemoryError: too large"):
        warm_up(Sizes("a", most=0), 8)


def test_failing_warm_up_raises() -> None:
    for model, text in {
        WarmsUpBadly(): "OutputMismatchError: infer returned 0 outputs for 1",
        RaisesOnWarmUp(): "ValueError: too cold",
        Warm("abc"): "TypeError: they are a str; return a list",
        Warm(5): "TypeError: 'int' object is not iterable",  # type: ignore[arg-type]  # wrong on purpose
    }.items():
        with pytest.raises(WorkerStartupError, match=rf"during warm-up .*warmup_inputs.*{text}"):
            warm_up(model, 4)


def test_a_model_may_use_its_inputs_up() -> None:
    class Consuming(Sizes):
        def infer(self, inputs: list[Any]) -> list[Any]:
            self.seen.append([(one.pop("text"), one["file"].read()) for one in inputs])
            return inputs

    model = Consuming(*[{"text": text, "file": io.BytesIO(b"file")} for text in "ab"])
    assert [size for size, _ in warm_up(model, 3)] == [1, 3]
    a, b = ("a", b"file"), ("b", b"file")
    assert model.seen == [[a], [a], [a, b, a], [a, b, a]]


def test_unpicklable_inputs_are_computed_unchanged() -> None:
    model = Sizes(lambda: None)
    warm_up(model, 2)
    assert model.seen == [[*model.inputs]] * 2 + [[*model.inputs] * 2] * 2
