"""Cost and group functions: those that answer, and every way not to. And with them in a batcher."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from models.base import Echo
from models.ordinary import Gated
from waits import ONE_LOOP, Gate, call, outcome, turns, until

from fast_batcher import (
    BatcherError,
    ConfigurationError,
    DynBatcher,
    InferenceModel,
    RequestTooLargeError,
)
from fast_batcher._core.values import Request
from fast_batcher._opening.outcomes import CostEvaluator
from fast_batcher._process import SLOW
from fast_batcher.settings import LEAST_COST, Settings

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """One loop: what a request costs has nothing to do with it."""
    return ONE_LOOP


def cost_evaluator(
    cost: Callable[[Any], Any] | None = None,
    group_by: Callable[[Any], Any] | None = None,
    max_request_cost: float | None = None,
) -> CostEvaluator:
    settings = Settings(cost=cost, group_by=group_by, max_request_cost=max_request_cost)
    return CostEvaluator(settings, "Echo")


def fault_of(value: Any, **functions: Any) -> BatcherError | None:
    return cost_evaluator(**functions).evaluate(Request(value, None))


class Nasty:
    """Raises whatever is done with it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    def __float__(self) -> float:
        raise RuntimeError("not a number")

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


class Colliding:
    """Hashable and equal to itself, but raises when it is compared with another."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise RuntimeError("not to be compared")


@pytest.mark.parametrize("cost", [1, 0.5, np.int64(3), np.float32(2.0), Fraction(1, 2), 1e15])
def test_a_cost_is_any_finite_number(cost: Any) -> None:
    request = Request("input", None)
    assert cost_evaluator(cost=lambda _: cost).evaluate(request) is None
    assert request.cost == float(cost)
    assert type(request.cost) is float


def test_an_input_that_costs_nothing_has_the_least_cost() -> None:
    request = Request("", None)
    assert cost_evaluator(cost=len).evaluate(request) is None
    assert request.cost == LEAST_COST


@pytest.mark.parametrize(
    "cost",
    [
        *(-1, -0.5, math.nan, math.inf, -math.inf, "7", b"7", None, True, False, [1], 1j, 1e300),
        *(1e16, 10**400, np.float64("nan"), np.bool_(True), np.ones(2), Decimal(1), Nasty()),
    ],
    ids=lambda cost: type(cost).__name__,
)
def test_invalid_cost_fails_its_request(cost: Any) -> None:
    assert isinstance(fault_of("input", cost=lambda _: cost), ConfigurationError)


class Unequal(str):
    """Not equal to itself."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, _: object) -> bool:
        return False


@pytest.mark.parametrize("settings", [{"cost": str}, {"group_by": Unequal}])
def test_an_error_does_not_show_the_input(settings: dict[str, Any]) -> None:
    fault = fault_of("canary", **settings)
    assert isinstance(fault, ConfigurationError)
    assert "canary" not in str(fault)


@pytest.mark.parametrize(
    "key", [[1], {}, math.nan, np.array([1, 2]), Nasty()], ids=lambda k: type(k)
)
def test_invalid_key_fails_its_request(key: Any) -> None:
    fault = fault_of("input", group_by=lambda _: key)
    assert isinstance(fault, ConfigurationError)
    assert "group_by" in str(fault)


def test_raising_key_comparison_fails_second_request() -> None:
    one = cost_evaluator(group_by=lambda value: value)
    first, second = Request(Colliding(), None), Request(Colliding(), None)
    assert one.evaluate(first) is None
    assert isinstance(one.evaluate(second), ConfigurationError)
    assert one.evaluate(first) is None


@pytest.mark.slow
def test_a_slow_function_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def slow(value: Any) -> float:
        time.sleep(1.5 * SLOW)
        return 1.0

    one = cost_evaluator(cost=slow)
    assert [one.evaluate(Request("input", None)) for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cost or group_by took" in record.getMessage()


# In a batcher.


@pytest.mark.slow
async def test_a_fault_is_its_callers_alone() -> None:
    def cost(value: Any) -> float:
        return float(1 / value)

    async with DynBatcher(Echo, cost=cost, max_request_cost=1) as batcher:
        calls = [call(batcher, value) for value in (1, 0, 2, -1, "text", 0.5, 4)]
        outcomes = [await outcome(one) for one in calls]
        wrong, large = ConfigurationError, RequestTooLargeError
        expected = [int, wrong, int, wrong, wrong, large, int]
        assert [type(one) for one in outcomes] == expected
        assert outcomes[::6] == [1, 4]
        assert (batcher.stats.rejected, batcher.stats.completed) == (4, 3)


@pytest.mark.slow
async def test_priority_works_with_every_call(gate: Gate) -> None:
    async with DynBatcher(Gated, 1, model_args=(gate.path,)) as batcher:
        calls = [call(batcher, "running")]
        visit = await gate.visit()
        # A second batch goes to the busy worker at once.
        calls.append(call(batcher, "next"))
        await turns()
        calls += [call(batcher, "low"), call(batcher, "lower", priority=-1)]
        calls += [call(batcher, "high", priority=7)]
        await turns()
        future = batcher.submit("higher", priority=8)
        await until(lambda: batcher.stats.waiting == 4)
        order = []
        for _ in range(6):
            visit.let_on()
            order += visit.note
            if len(order) < 6:
                visit = await gate.visit()
        assert order == ["running", "next", "higher", "high", "low", "lower"]
        assert [await one for one in calls][-1] == "high"
        await until(future.done)


@pytest.mark.slow
async def test_share_works_with_every_call(gate: Gate) -> None:
    async with DynBatcher(Gated, 1, model_args=(gate.path,)) as batcher:
        calls = [call(batcher, "running")]
        visit = await gate.visit()
        # A second batch goes to the busy worker at once.
        calls.append(call(batcher, "next"))
        await turns()
        calls += [call(batcher, f"a{number}", share="a") for number in range(3)]
        await turns()
        future = batcher.submit("b", share="b")
        await until(lambda: batcher.stats.waiting == 4)
        many = asyncio.create_task(batcher.process_many(["c", "c"], share=3))
        await until(lambda: batcher.stats.waiting >= 5)
        order = []
        for _ in range(8):
            visit.let_on()
            order += visit.note
            if len(order) < 8:
                visit = await gate.visit()
        assert order[:2] == ["running", "next"]
        assert set(order[2:5]) == {"a0", "b", "c"}
        assert order.index("a1") < order.index("a2")
        assert await many == ["c", "c"]
        await asyncio.gather(*calls)
        await until(future.done)
        wrong: Any = {"share": True}
        with pytest.raises(ConfigurationError, match=r"^share=True: give a text"):
            batcher.submit("input", **wrong)
        with pytest.raises(ConfigurationError, match=r"^share=True: give a text"):
            await batcher.process_many(["input"], **wrong)


@pytest.mark.slow
async def test_a_priority_is_a_small_whole_number() -> None:
    async with DynBatcher(Echo) as batcher:
        for priority in (101, -101, 1.5, "1", True, None, math.nan):
            wrong: Any = {"priority": priority}
            match = r"^priority=.*: give a whole number, -100 to 100"
            with pytest.raises(ConfigurationError, match=match):
                await batcher.process_batched("input", **wrong)
            with pytest.raises(ConfigurationError, match=match):
                batcher.submit("input", **wrong)
            with pytest.raises(ConfigurationError, match=match):
                await batcher.process_many(["input"], **wrong)
        assert await batcher.process_many(["a", "b"], priority=-3) == ["a", "b"]


# The model's own.


class Tokens(InferenceModel[str, int]):
    @staticmethod
    def cost(value: str) -> float:
        return len(value)

    def infer(self, inputs: list[str]) -> list[int]:
        return [len(inputs) for _ in inputs]


class TokensOfClass(Tokens):
    @classmethod
    def cost(cls, value: str) -> float:
        return len(value)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Tokens, TokensOfClass])
async def test_a_model_brings_its_cost(model: Any) -> None:
    async with DynBatcher(model, max_request_cost=3) as batcher:
        assert await batcher.process_batched("abc") == 1
        with pytest.raises(RequestTooLargeError):
            await batcher.process_batched("abcd")
    async with DynBatcher(model, cost=lambda _: 1, max_request_cost=3) as batcher:
        assert await batcher.process_batched("abcd") == 1
