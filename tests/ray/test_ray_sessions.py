"""Sessions of a `SessionModel` on actors: states, order, ends, deaths."""

import asyncio
from typing import Any

import pytest
from models.remembering import Diary, Line
from ray_nodes import RayCluster, needs_ray
from waits import assert_balance, one_loop, until

from fast_batcher import DynBatcher, SessionLostError
from fast_batcher.ray import RayWorkers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_ray, one_loop]


async def speak(batcher: DynBatcher[Any, Any], name: str, count: int) -> None:
    async with batcher.session() as session:
        for number in range(1, count + 1):
            answer = await session.process_batched(Line(name, number))
            assert answer[:2] == (name, number)


async def test_sessions_keep_their_states_and_end(cluster: RayCluster) -> None:
    async with DynBatcher(Diary, workers=RayWorkers(), max_batch_size=4) as batcher:
        await asyncio.gather(*[speak(batcher, f"s{number}", 9) for number in range(20)])
        _, begun, left = await batcher.process_batched(Line("states", 0, "states"))
        assert (begun, left) == (21, 20)
        async with batcher.session() as session:
            await session.process_batched(Line("s", 1))
            with pytest.raises(SessionLostError):
                await session.process_batched(Line("s", 2, "kill"))
            with pytest.raises(SessionLostError, match=r"ended: .*worker"):
                await session.process_batched(Line("s", 3))
        await speak(batcher, "next", 3)
        await until(lambda: batcher.stats.sessions == 0)
        assert_balance(batcher)
