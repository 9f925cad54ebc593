"""Failures of a Ray cluster under load: actors, nodes, the host, the head."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from models.on_ray import Placed
from ray_nodes import HEAD, OTHER, RayCluster, needs_ray
from waits import LIMIT, Watch, assert_balance, one_loop, until

from fast_batcher import DynBatcher, NotReadyError, PoisonRequestError, WorkerLostError
from fast_batcher._host.client import RemoteOpening
from fast_batcher.ray import RayWorkers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_ray, one_loop]

SPREAD = RayWorkers(2, scheduling_strategy="SPREAD")


class Load:
    """Callers that call a batcher again and again, and the outcomes of their calls."""

    def __init__(self, batcher: DynBatcher[Any, Any]) -> None:
        self._batcher = batcher
        self.pids: dict[int, int] = {}
        self.errors: list[Exception] = []

    @property
    def answered(self) -> int:
        return sum(self.pids.values())

    async def call(self) -> None:
        while True:
            try:
                _, pid = await self._batcher.process_batched(0)
                self.pids[pid] = self.pids.get(pid, 0) + 1
            except Exception as error:  # noqa: BLE001  an outcome as any other
                self.errors.append(error)
                # As a client that has got 503.
                await asyncio.sleep(0.01)

    async def more(self, count: int = 200) -> None:
        """Wait for some more answers."""
        wanted = self.answered + count
        await until(lambda: self.answered >= wanted)


@asynccontextmanager
async def loaded(batcher: DynBatcher[Any, Any]) -> AsyncIterator[Load]:
    load = Load(batcher)
    async with batcher:
        callers = [asyncio.create_task(load.call()) for _ in range(16)]
        try:
            await load.more()
            yield load
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)


def host_of(batcher: DynBatcher[Any, Any]) -> int:
    """The pid of its host, 0 while there is none."""
    assert isinstance(batcher._opening, RemoteOpening)
    return batcher._opening._link.pid or 0


async def test_killed_actors_cost_no_request(cluster: RayCluster) -> None:
    batcher = DynBatcher(Placed, 4, model_args=[0.005], workers=SPREAD)
    async with loaded(batcher) as load:
        for restarts in (1, 2):
            load.pids.clear()
            await until(lambda: len(load.pids) == 2)
            os.kill(max(load.pids), signal.SIGKILL)
            await until(lambda: batcher.stats.restarts == restarts)  # noqa: B023
    assert load.errors == []
    assert_balance(batcher)


async def test_request_that_kills_its_actor_is_poison(cluster: RayCluster) -> None:
    batcher = DynBatcher(Placed, 4, model_args=[0.005], workers=SPREAD)
    async with loaded(batcher) as load:
        with pytest.raises(PoisonRequestError):
            await batcher.process_batched("die")
        await load.more()
    assert load.errors == []


async def test_non_idempotent_request_fails_with_its_actor(cluster: RayCluster) -> None:
    options: dict[str, Any] = {"idempotent": False, "workers": RayWorkers()}
    async with DynBatcher(Placed, **options) as batcher:
        with pytest.raises(WorkerLostError):
            await batcher.process_batched("die")
        assert (await batcher.process_batched(1))[0] == 1


async def test_other_node_serves_after_node_death(cluster: RayCluster) -> None:
    batcher = DynBatcher(Placed, 4, model_args=[0.005], workers=SPREAD)
    async with loaded(batcher) as load:
        await until(lambda: len(load.pids) == 2)
        cluster.kill(OTHER)
        try:
            load.pids.clear()
            # The actor of the dead node has another place.
            await until(lambda: batcher.stats.restarts == 1)
            await load.more()
        finally:
            cluster.start(OTHER)
    assert load.errors == []


async def test_next_host_serves_after_host_death(cluster: RayCluster) -> None:
    batcher = DynBatcher(Placed, 4, model_args=[0.005], workers=SPREAD)
    async with loaded(batcher) as load:
        host = host_of(batcher)
        with Watch([*load.pids]) as actors:
            os.kill(host, signal.SIGKILL)
            await until(lambda: host_of(batcher) not in (0, host))
            load.pids.clear()
            await load.more()
            assert actors.survivors(LIMIT) == []
    assert load.errors == []


async def test_calls_recover_with_the_cluster(cluster: RayCluster) -> None:
    """Both nodes end with the head; this process and its batcher do not."""
    options: dict[str, Any] = {"restart_window": 3.0, "max_restarts": 2, "timeout": LIMIT}
    batcher = DynBatcher(Placed, 4, model_args=[0.005], workers=SPREAD, **options)
    async with loaded(batcher) as load:
        try:
            cluster.kill(HEAD)
            cluster.kill(OTHER)
            await until(lambda: any(type(one) is NotReadyError for one in load.errors))
            await until(lambda: batcher.state == "broken")
            assert not batcher.is_ready
        finally:
            cluster.start(HEAD)
            cluster.start(OTHER)
        await load.more()
        assert batcher.state == "open"
    for error in load.errors:
        assert isinstance(error, NotReadyError), error
        assert error.retry_after is not None
