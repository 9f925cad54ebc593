"""Errors inside the pump: calls fail, the error is logged, the batcher continues."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from faulty_policy import FaultyPolicy
from models.base import Echo
from models.ordinary import Gated
from openings import opening_of
from waits import SOON, Gate, assert_balance, call, outcome, turns, until

from fast_batcher import BatcherError, DeadlineExceededError, DynBatcher
from fast_batcher._core.values import Limits

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LOG = logging.getLogger("fast_batcher")


def set_policy(batcher: DynBatcher[Any, Any], where: str) -> None:
    limits = Limits(max_batch_size=2, max_queue_size=100)
    opening_of(batcher).scheduler.reconfigure(limits, FaultyPolicy(where))


def faults(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if "an internal error" in one.getMessage()]


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("where", ["decide", "arrived"])
async def test_calls_taken_by_failed_pump_fail(
    where: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with DynBatcher(Echo, 2, timeout=None) as batcher:
        set_policy(batcher, where)
        calls = [call(batcher, number) for number in range(count)]
        outcomes = [await outcome(one) for one in calls]
        failed = [one for one in outcomes if isinstance(one, BaseException)]
        # A full batch is not asked about.
        assert len(failed) == (count % 2 if where == "decide" else count)
        for error in failed:
            assert type(error) is BatcherError
            assert "IndexError: a fault of ours" in str(error)
        assert len(faults(caplog)) == min(len(failed), 1)
        for record in faults(caplog):
            assert record.levelno == logging.ERROR
            assert record.exc_info is not None
            assert record.exc_info[0] is IndexError
        # By every way to call.
        set_policy(batcher, "arrived")
        with pytest.raises(BatcherError, match="a fault of ours"):
            await asyncio.wrap_future(batcher.submit(1))
        set_policy(batcher, "arrived")
        with pytest.raises(BatcherError, match="a fault of ours"):
            await batcher.process_many(range(5))
        assert await batcher.process_many(range(7)) == [*range(7)]
        stats = assert_balance(batcher)
        assert (stats.waiting, stats.running, stats.restarts) == (0, 0, 0)


async def test_calls_of_unsent_batch_end_with_error(gate: Gate) -> None:
    """Neither the way of a lone request nor that of what had waited."""
    async with DynBatcher(Gated, 2, model_args=(gate.path,), timeout=None) as batcher:
        workers = opening_of(batcher).pool.workers
        ((worker, record),) = workers.items()
        del workers[worker]
        lone = await outcome(call(batcher, "lone"))
        assert type(lone) is BatcherError
        workers[worker] = record
        running = call(batcher, "running")
        visit = await gate.visit()
        del workers[worker]
        behind = [call(batcher, number) for number in range(2)]
        for one in behind:
            assert type(await outcome(one)) is BatcherError
        workers[worker] = record
        visit.let_on()
        gate.close()
        assert await outcome(running) == "running"
        assert await batcher.process_batched("next") == "next"
        stats = assert_balance(batcher)
        assert (stats.completed, stats.failed, stats.restarts) == (2, 3, 0)


class Refuses(logging.Filter):
    """Raises for everything that is logged about workers, as a filter of a user may."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Raise, or let it pass."""
        if "worker %d" in str(record.msg):
            raise RuntimeError("a filter that raises")
        return True


@pytest.fixture
def _broken_logging() -> Iterator[None]:
    broken = Refuses()
    LOG.addFilter(broken)
    yield
    LOG.removeFilter(broken)


@pytest.mark.usefixtures("_broken_logging")
async def test_raising_log_filter_does_not_block_errors(gate: Gate) -> None:
    """An error of logging does not stop the rest of the turn."""
    settings: dict[str, Any] = {"num_workers": 2, "timeout": SOON}
    async with DynBatcher(Gated, 1, model_args=(gate.path,), **settings) as batcher:
        calls = [call(batcher, number) for number in range(2)]
        await turns()
        for _ in range(2):
            await gate.visit()
        for one in calls:
            assert isinstance(await outcome(one), DeadlineExceededError)
        await until(lambda: batcher.stats.workers_ready == 0)
        gate.close()
        await until(lambda: batcher.stats.workers_ready == 2)
        assert await batcher.process_batched("next") == "next"
        assert_balance(batcher)
