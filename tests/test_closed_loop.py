"""Clients that wait for their answers, in a process of their own, and what is measured of them."""

import asyncio
import time

import pytest

from benchmarks import hold
from benchmarks.closed_loop import closed_loop
from benchmarks.models import MODELS, SIZED
from benchmarks.report import Measurement
from benchmarks.scenarios import Load, mean_batch_size, steady_rate


def pair(
    repetition: int, adaptive: float, greedy: float | None, clients: int = 32
) -> list[Measurement]:
    found = []
    for system, rate in ((hold.ADAPTIVE, adaptive), (hold.GREEDY, greedy)):
        figures = {} if rate is None else {"requests_per_second": rate}
        found.append(
            Measurement(system, "closed_loop", "asyncio", clients, repetition, figures, {})
        )
    return found


def test_the_mean_batch_is_that_of_the_batches_and_not_of_the_requests() -> None:
    # One batch of 9 and one of 1: five on average, though nine of ten requests were among nine.
    assert mean_batch_size([9] * 9 + [1]) == pytest.approx(5)


def test_a_steady_rate_has_no_share_of_start_and_end() -> None:
    assert steady_rate([[1.0, 1.5, 2.0], [7.0, 8.0], [3.0], []]) == pytest.approx(2 + 1)


def test_the_models_that_tell_their_size_take_the_simulations_time() -> None:
    for name, simulated in SIZED.items():
        start = time.perf_counter()
        answers = MODELS[name]().infer(["a", "b"])
        assert time.perf_counter() - start >= simulated.seconds(2)
        assert answers == [("a", 2), ("b", 2)]
        load = Load(name, 2, 1, 1.0)
        assert load.is_right((load.payload(), 2))
        assert not load.is_right(("another", 2))


def test_each_client_has_one_request_under_way_and_asks_again_after_its_answer() -> None:
    under_way: set[object] = set()
    most = 0

    async def answer(value: object) -> object:
        nonlocal most
        assert value not in under_way
        under_way.add(value)
        most = max(most, len(under_way))
        await asyncio.sleep(0.005)
        under_way.remove(value)
        return value, 1

    figures = asyncio.run(closed_loop(answer, Load("Gpu", 1, 4, 0.5, seed=1)))
    assert most == 4
    assert figures["lost"] == 0
    assert figures["batch_size"] == 1
    # No answer before its time, and no client without a pause.
    assert figures["p50_ms"] >= 5
    assert 0 < figures["requests_per_second"] <= 4 / 0.0051


def test_a_client_whose_request_fails_asks_again() -> None:
    asked = 0

    async def refuse_every_other(value: object) -> object:
        nonlocal asked
        asked += 1
        if asked % 2:
            raise RuntimeError("no more")
        return value, 1

    figures = asyncio.run(closed_loop(refuse_every_other, Load("Gpu", 1, 1, 0.2, seed=1)))
    assert asked > 2
    assert 0 < figures["lost"] < 1


def test_what_is_refused_during_the_warm_up_is_not_counted() -> None:
    asked = 0

    async def refuse_the_first(value: object) -> object:
        nonlocal asked
        asked += 1
        if asked <= 3:
            raise RuntimeError("not yet")
        return value, 1

    figures = asyncio.run(closed_loop(refuse_the_first, Load("Gpu", 1, 1, 0.2, seed=1)))
    assert asked > 3
    assert figures["lost"] == 0


def test_the_gain_is_taken_pair_by_pair() -> None:
    # The machine is ten times slower in the second pair.
    runs = [*pair(0, 130.0, 100.0), *pair(1, 13.0, 10.0), *pair(2, 500.0, None)]
    estimate = hold.gain(runs, "asyncio", 32)
    assert estimate is not None
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((30, 30, 30))
    assert hold.gain(runs, "uvloop", 32) is None
    assert hold.gain(pair(0, 130.0, 100.0), "asyncio", 32) is None


def test_a_loss_is_judged_by_its_bound_and_a_gain_by_its_own() -> None:
    def judge(*rates: float) -> list[bool | None]:
        runs = [one for number, rate in enumerate(rates) for one in pair(number, rate, 100.0)]
        return [verdict.holds for verdict in hold.verdicts(runs, "asyncio", [32])]

    assert judge(130, 131, 129) == [True, True]
    # On average nothing is lost; the bound is at 14 %.
    assert judge(110, 90, 100, 100) == [False, False]
    assert judge(98, 98.1, 97.9) == [True, False]
    assert judge() == [None, None]
    text = hold.text_of(pair(0, 130.0, 100.0) + pair(1, 132.0, 100.0), ["asyncio"], [32])
    assert "+31.0" in text
