"""`@inference.dynamically`: features to batches and back, as arrays and as tensors."""

import asyncio
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from held import Held, InThread, spin_until
from hypothesis import given
from hypothesis import strategies as st

import fast_batcher
from fast_batcher import inference
from fast_batcher.errors import (
    CollationError,
    ConfigurationError,
    InferenceError,
    OutputMismatchError,
)

Features = dict[str, Any]


def sums(features: Features) -> Any:
    """One number per row."""
    return features["ids"].sum(1)


def rows_of(*lengths: int, dtype: Any = numpy.int64) -> list[Any]:
    return [numpy.arange(1, length + 1, dtype=dtype) for length in lengths]


def call_together(function: Any, *calls: Features) -> list[Any]:
    """The outputs of calls of one turn, which share a batch."""

    async def main() -> list[Any]:
        return await asyncio.gather(*map(function.acall, calls))

    return asyncio.run(main())


def test_the_name_is_found_from_the_package() -> None:
    assert fast_batcher.inference is inference


def test_arrays_in_an_array_out() -> None:
    with inference.dynamically(sums) as function:
        result = function({"ids": numpy.array([[1, 2], [3, 4], [5, 6]])})
        assert type(result) is numpy.ndarray
        assert result.tolist() == [3, 7, 11]


def test_tensors_in_a_tensor_out() -> None:
    with inference.dynamically(sums) as function:
        result = function(ids=torch.tensor([[1, 2], [3, 4]]))
        assert isinstance(result, torch.Tensor)
        assert result.tolist() == [3, 7]
        assert result.dtype == torch.int64


def test_features_may_be_in_any_mapping() -> None:
    """As the answer of a tokenizer, which is no dict."""
    with inference.dynamically(sums) as function:
        features = UserDict(ids=numpy.array([[1, 2], [3, 4]]))
        assert function(features).tolist() == [3, 7]
        assert asyncio.run(_acall(function, features)).tolist() == [3, 7]


async def _acall(function: Any, features: Any) -> Any:
    return await function.acall(features)


@pytest.mark.parametrize("make", [numpy.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_a_feature_may_be_a_list_of_rows(make: Callable[[Any], Any]) -> None:
    with inference.dynamically(sums) as function:
        result = function({"ids": [make(row) for row in rows_of(2, 3)]})
        assert result.tolist() == [3, 6]


def test_rows_of_different_calls_share_a_padded_batch() -> None:
    batches: list[Features] = []

    @inference.dynamically(pad_tokens={"ids": 9, "mask": 0}, padding_side="left")
    def note(features: Features) -> Any:
        batches.append(features)
        return features["ids"][:, -1]

    with note:
        results = call_together(
            note,
            {"ids": numpy.array([[1, 2, 3]]), "mask": numpy.array([[1, 1, 1]])},
            {"ids": numpy.array([[4], [5]]), "mask": numpy.array([[1], [1]])},
        )
    assert [result.tolist() for result in results] == [[3], [4, 5]]
    ((batch),) = batches
    assert batch["ids"].tolist() == [[1, 2, 3], [9, 9, 4], [9, 9, 5]]
    assert batch["mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "bool"])
def test_padding_keeps_the_dtype(dtype: str) -> None:
    """Where `batched` makes integers of everything."""
    seen: list[Any] = []

    @inference.dynamically
    def note(features: Features) -> Any:
        seen.append(features["x"].dtype)
        return features["x"]

    with note:
        rows = [numpy.array([1, 1], dtype), numpy.array([1, 0, 1], dtype)]
        result = note({"x": rows})
        assert result.dtype == dtype
        assert result.tolist() == [[1, 1, 0], [1, 0, 1]]
    assert seen == [numpy.dtype(dtype)]


def test_fractions_stay_fractions() -> None:
    with inference.dynamically(lambda features: features["x"]) as function:
        result = function({"x": numpy.array([[0.25, 0.75]])})
        assert result.tolist() == [[0.25, 0.75]]


def test_rows_of_several_axes_and_of_none() -> None:
    def answer(features: Features) -> Any:
        return features["image"].sum((1, 2)) + features["label"]

    with inference.dynamically(answer) as function:
        features = {"image": numpy.ones((3, 4, 4)), "label": numpy.array([1, 2, 3])}
        assert function(features).tolist() == [17.0, 18.0, 19.0]


def test_features_may_be_spread() -> None:
    def add(a: Any, b: Any) -> Any:
        return a + b

    with inference.dynamically(spread_kwargs=True)(add) as function:
        assert function(a=numpy.array([[1]]), b=numpy.array([[2]])).tolist() == [[3]]
        assert function({"a": numpy.array([[1]]), "b": numpy.array([[2]])}).tolist() == [[3]]


def test_pad_token_is_another_name() -> None:
    @inference.dynamically(pad_token={"ids": 7})
    def answer(features: Features) -> Any:
        return features["ids"]

    with answer:
        assert answer({"ids": rows_of(1, 2)}).tolist() == [[1, 7], [1, 2]]


# Outputs.


def test_a_dict_of_outputs() -> None:
    def answer(features: Features) -> Features:
        return {"sum": features["ids"].sum(1), "first": features["ids"][:, :1]}

    with inference.dynamically(answer) as function:
        one, two = call_together(
            function, {"ids": numpy.array([[1, 2]])}, {"ids": numpy.array([[3, 4], [5, 6]])}
        )
        assert (one["sum"].tolist(), two["sum"].tolist()) == ([3], [7, 11])
        assert two["first"].tolist() == [[3], [5]]


def test_a_list_is_several_outputs_as_in_batched() -> None:
    @inference.dynamically
    def answer(features: Features) -> list[Any]:
        return [features["ids"] * 2, features["ids"].sum(1)]

    with answer:
        doubled, summed = answer({"ids": torch.tensor([[1, 2], [3, 4], [5, 6]])})
        assert doubled.tolist() == [[2, 4], [6, 8], [10, 12]]
        assert summed.tolist() == [3, 7, 11]


def test_or_rows_if_one_says_so() -> None:
    @inference.dynamically(outputs="rows")
    def answer(features: Features) -> list[Any]:
        return [row * 2 for row in features["ids"]]

    with answer:
        assert answer({"ids": numpy.array([[1, 2], [3, 4]])}).tolist() == [[2, 4], [6, 8]]


def test_what_can_be_read_in_two_ways_is_an_error_where_one_asks_for_that() -> None:
    decorate = inference.dynamically(outputs="auto")
    with decorate(lambda features: [features["ids"]] * 2) as function:
        features = {"ids": numpy.array([[1, 2], [3, 4]])}
        with pytest.raises(OutputMismatchError, match="outputs='rows'"):
            function(features)


def test_another_number_of_rows_is_an_error() -> None:
    with inference.dynamically(lambda features: features["ids"][1:]) as function:
        features = {"ids": numpy.array([[1], [2]])}
        with pytest.raises(OutputMismatchError, match="1 rows for 2 inputs"):
            function(features)


# Calls.


def test_a_large_call_is_split_and_joined_again() -> None:
    sizes: list[int] = []

    @inference.dynamically(batch_size=8)
    def answer(features: Features) -> Any:
        sizes.append(len(features["ids"]))
        return features["ids"] * 2

    with answer:
        ids = numpy.arange(300).reshape(100, 3)
        assert (answer({"ids": ids}) == ids * 2).all()
    assert max(sizes) == 8
    assert sum(sizes) == 100


def test_what_comes_while_the_function_computes_is_one_batch() -> None:
    held = Held()

    @inference.dynamically
    def answer(features: Features) -> Any:
        return numpy.array(held(features["x"].tolist()))

    with answer:
        calls = [InThread(answer, {"x": numpy.array([0])})]
        held.next_batch()
        calls += [InThread(answer, {"x": numpy.array([n, n])}) for n in (1, 2)]
        spin_until(lambda: answer.stats.queue_size == 4)
        held.let_on(2)
        assert [call.result().tolist() for call in calls] == [[0], [2, 2], [4, 4]]
        assert sorted(held.next_batch()) == [1, 1, 2, 2]


def test_an_async_function_and_methods() -> None:
    class Model:
        factor = 3

        @inference.dynamically
        async def scale(self, features: Features) -> Any:
            await asyncio.sleep(0)
            return self.factor * features["x"]

    model = Model()
    assert model.scale({"x": numpy.array([1, 2])}).tolist() == [3, 6]
    assert model.scale(x=numpy.array([1, 2])).tolist() == [3, 6]
    calls: Any = Model.scale
    assert calls(model, {"x": numpy.array([5])}).tolist() == [15]
    assert calls(model, x=numpy.array([5])).tolist() == [15]
    model.scale.shutdown()


def test_rows_that_cannot_share_a_batch_are_computed_apart() -> None:
    """A batch that cannot be made is divided as one that fails, so each gets its own answer."""
    with inference.dynamically(lambda features: features["ids"].sum(1)) as function:
        ints, floats = call_together(
            function, {"ids": numpy.array([[1, 2]])}, {"ids": numpy.array([[0.5, 1.0]])}
        )
        assert (ints.tolist(), floats.tolist()) == ([3], [1.5])


@pytest.mark.parametrize(
    ("arguments", "features"),
    [((), {}), ((1,), {}), (({"a": [1]}, {"b": [2]}), {}), (({"a": [1]},), {"b": [2]})],
)
def test_it_is_called_with_features(arguments: Any, features: Any) -> None:
    class Uncalled:
        def __call__(self, features: Features) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match="one dict of features"):
        inference.dynamically(Uncalled())(*arguments, **features)


def test_features_that_are_no_batch_are_refused() -> None:
    function = inference.dynamically(sums)
    with pytest.raises(CollationError, match="numbers of rows"):
        function({"a": numpy.zeros((2, 1)), "b": numpy.zeros((3, 1))})
    with pytest.raises(CollationError, match="no rows"):
        function({"a": numpy.zeros((0, 1))})


def test_the_error_of_a_function_reaches_its_callers() -> None:
    def fail(features: Features) -> Any:
        raise KeyError("ids")

    with inference.dynamically(fail) as function, pytest.raises(KeyError) as caught:
        function({"x": numpy.zeros((2, 1))})
    assert isinstance(caught.value, InferenceError)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"padding_side": "top"}, "padding_side='top'"),
        ({"pad_tokens": 3}, "pad_tokens=3"),
        ({"pad_tokens": {"a": 1}, "pad_token": {"a": 2}}, "pad_token="),
        ({"outputs": "many"}, "outputs='many'"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_wrong_settings_are_refused_when_it_is_decorated(settings: Any, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        inference.dynamically(**settings)
    assert named in str(caught.value)


@given(
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=5),
    side=st.sampled_from(["left", "right"]),
    of_torch=st.booleans(),
    batch_size=st.integers(1, 6),
)
def test_every_row_comes_back_to_its_caller(
    lengths: list[list[int]], side: str, of_torch: bool, batch_size: int
) -> None:
    make: Any = torch.as_tensor if of_torch else numpy.asarray
    decorate = inference.dynamically(padding_side=side, batch_size=batch_size)
    calls = []
    for number, of_call in enumerate(lengths):
        rows = [numpy.full(n, 100 * number + at + 1) for at, n in enumerate(of_call)]
        calls.append({"ids": [make(row) for row in rows]})
    with decorate(sums) as function:
        results = call_together(function, *calls)
    for call, result in zip(calls, results, strict=True):
        assert result.tolist() == [int(row.sum()) for row in call["ids"]]
