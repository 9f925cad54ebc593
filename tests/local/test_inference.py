"""`@inference.dynamically`: features to batches and back, as arrays and as tensors."""

import asyncio
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from gated_functions import in_one_batch
from hypothesis import given
from hypothesis import strategies as st
from tables import Frame, Short

from fast_batcher import aio, inference
from fast_batcher.errors import CollationError, OutputMismatchError

Features = dict[str, Any]


def sums(features: Features) -> Any:
    """One number per row."""
    return features["ids"].sum(1)


@pytest.mark.parametrize("make", [numpy.asarray, torch.as_tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "features_of",
    [
        lambda make: {"ids": make([[1, 2], [3, 4]])},
        # As the answer of a tokenizer, which is no dict.
        lambda make: UserDict(ids=make([[1, 2], [3, 4]])),
        lambda make: {"ids": [make([1, 2]), make([3, 4, 0])]},
        lambda make: {"ids": make([[0.25, 2.75], [3.5, 3.5]])},
    ],
    ids=["array", "any mapping", "list of rows", "fractions"],
)
def test_outputs_have_the_array_kind_of_inputs(
    make: Callable[[Any], Any], features_of: Callable[[Any], Any]
) -> None:
    features = features_of(make)
    with inference.dynamically(sums) as function:
        results = [function(features), function(**features), *in_one_batch(function, features)]
        for result in results:
            assert isinstance(result, type(make([0])))
            assert result.tolist() == [3, 7]


def test_features_may_be_spread() -> None:
    def add(a: Any, b: Any) -> Any:
        return a + b

    with inference.dynamically(spread_kwargs=True)(add) as function:
        assert function(a=numpy.array([[1]]), b=numpy.array([[2]])).tolist() == [[3]]
        assert function({"a": numpy.array([[1]]), "b": numpy.array([[2]])}).tolist() == [[3]]


# Outputs.


@pytest.mark.parametrize(
    ("options", "function", "outputs"),
    [
        (
            {},
            lambda ids: {"sum": ids.sum(1), "first": ids[:, :1]},
            [{"sum": [3], "first": [[1]]}, {"sum": [7, 11], "first": [[3], [5]]}],
        ),
        # As in `batched`.
        ({}, lambda ids: [ids * 2, ids.sum(1)], [[[[2, 4]], [3]], [[[6, 8], [10, 12]], [7, 11]]]),
        ({"outputs": "rows"}, lambda ids: [row * 2 for row in ids], [[[2, 4]], [[6, 8], [10, 12]]]),
    ],
    ids=["dict", "several outputs", "rows"],
)
def test_functions_may_return_several_kinds(
    options: Any, function: Any, outputs: list[Any]
) -> None:
    def as_lists(found: Any) -> Any:
        if isinstance(found, dict):
            return {name: as_lists(value) for name, value in found.items()}
        return found.tolist() if hasattr(found, "tolist") else [as_lists(one) for one in found]

    calls = ({"ids": numpy.array([[1, 2]])}, {"ids": numpy.array([[3, 4], [5, 6]])})
    with inference.dynamically(**options)(lambda features: function(features["ids"])) as decorated:
        assert [as_lists(found) for found in in_one_batch(decorated, *calls)] == outputs


@pytest.mark.parametrize(
    ("outputs", "function", "error"),
    [
        ("auto", lambda ids: [ids] * 2, "outputs='rows'"),
        ("several", lambda ids: ids[1:], "1 rows for 2 inputs"),
        ("several", lambda ids: Frame(len(ids)), r"the output is a Frame .*to_numpy\(\)"),
        ("rows", lambda ids: {"a": Frame(len(ids))}, r"output 'a' is a Frame .*to_numpy\(\)"),
        ("rows", lambda ids: Short(len(ids)), "return a plain array"),
    ],
    ids=["read in two ways", "too few rows", "table", "table in a dict", "sequence"],
)
@pytest.mark.parametrize("is_aio", [False, True])
def test_other_outputs_are_an_error(
    outputs: Any, function: Any, error: str, *, is_aio: bool
) -> None:
    dynamically: Any = aio.inference.dynamically if is_aio else inference.dynamically
    decorated = dynamically(outputs=outputs)(lambda features: function(features["ids"]))
    features = {"ids": numpy.array([[1, 2], [3, 4]])}

    async def call() -> None:
        async with decorated:
            await decorated(features)

    def call_and_block() -> None:
        with decorated:
            decorated(features)

    with pytest.raises(OutputMismatchError, match=error):
        asyncio.run(call()) if is_aio else call_and_block()


# Calls.


@pytest.mark.parametrize(
    ("arguments", "features", "given"),
    [
        ((), {}, ""),
        ((torch.zeros(3),), {}, "Tensor"),
        (({"a": [1]}, {"b": [2]}), {}, "dict, dict"),
        (({"a": [1]},), {"b": [2]}, "dict, b="),
    ],
)
def test_calls_need_features(arguments: Any, features: Any, given: str) -> None:
    class Uncalled:
        def __call__(self, features: Features) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match=rf"one dict of features.*this call has \({given}\)"):
        inference.dynamically(Uncalled())(*arguments, **features)


def test_features_that_are_no_batch_are_refused() -> None:
    function = inference.dynamically(sums)
    with pytest.raises(CollationError, match="numbers of rows"):
        function({"a": numpy.zeros((2, 1)), "b": numpy.zeros((3, 1))})
    with pytest.raises(CollationError, match="no rows"):
        function({"a": numpy.zeros((0, 1))})


@pytest.mark.slow
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
        results = in_one_batch(function, *calls)
    for call, result in zip(calls, results, strict=True):
        assert result.tolist() == [int(row.sum()) for row in call["ids"]]
