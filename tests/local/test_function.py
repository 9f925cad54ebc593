"""What a function may be, and what becomes of what it returns and raises."""

import functools
from typing import Any

import numpy
import pytest
from waits import shown

from fast_batcher._local.call_formats import list_outputs
from fast_batcher._local.function import (
    FailedOutput,
    Function,
    as_error,
    bind_weakly,
    is_async,
    without_own_frame,
)
from fast_batcher.errors import InferenceError, OutputMismatchError


def test_arrays_are_taken_row_by_row() -> None:
    first, second = list_outputs(numpy.arange(6).reshape(2, 3), 2)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4, 5])
    with pytest.raises(OutputMismatchError, match="first axis is the batch"):
        list_outputs(numpy.array(3), 1)
    with pytest.raises(OutputMismatchError, match="2 outputs for 3 inputs"):
        list_outputs(numpy.zeros((2, 3)), 3)


@pytest.mark.parametrize("outputs", ["ab", b"ab", bytearray(2), {0: 0, 1: 1}, {0, 1}, None, 2])
def test_what_is_no_sequence_of_outputs_is_refused(outputs: Any) -> None:
    with pytest.raises(OutputMismatchError, match=f"returned {type(outputs).__name__} for 2"):
        list_outputs(outputs, 2)


def test_exceptions_among_the_outputs_become_failures() -> None:
    function = Function(list, "f", is_async=False, split=list_outputs)
    outcomes = function.outcomes([1, ValueError("two"), KeyboardInterrupt(), 4], 4)
    assert [type(one) for one in outcomes] == [int, FailedOutput, FailedOutput, int]


async def _coroutine(items: list[int]) -> list[int]:
    return items


class _Called:
    async def __call__(self, items: list[int]) -> list[int]:
        return items

    async def method(self, items: list[int]) -> list[int]:
        return items


@pytest.mark.parametrize(
    "call",
    [_coroutine, functools.partial(_coroutine), functools.partial(_Called()), _Called().method],
    ids=shown,
)
def test_async_functions_are_known(call: Any) -> None:
    assert is_async(call)


@pytest.mark.parametrize(
    "call", [len, list, functools.partial(len), lambda items: items], ids=shown
)
def test_others_are_not(call: Any) -> None:
    assert not is_async(call)


def test_each_caller_has_an_error_of_its_own_with_the_same_cause() -> None:
    raised = ValueError("bad")
    one, two = as_error(raised), as_error(raised)
    assert one is not two
    assert one.__cause__ is two.__cause__ is raised
    assert isinstance(one, ValueError)
    assert type(as_error(SystemExit(3))) is InferenceError


def test_the_first_frame_is_taken_off() -> None:
    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011  any will do
        fail()
    assert without_own_frame(caught.value) is caught.value
    assert caught.value.__traceback__ is not None
    assert caught.value.__traceback__.tb_frame.f_code.co_name == "fail"
    never_raised = ValueError()
    assert without_own_frame(never_raised).__traceback__ is None


def test_a_method_does_not_keep_its_instance() -> None:
    class Model:
        def scale(self, items: list[int]) -> list[int]:
            return [3 * item for item in items]

    model = Model()
    call = bind_weakly(Model.scale, model)
    assert call([1]) == [3]
    del model
    with pytest.raises(InferenceError, match="is gone"):
        call([1])
