"""The contract of workers: the same for processes of this machine and actors of a Ray cluster."""

from pathlib import Path
from typing import Any

import pytest
from models.on_ray import Contract, Placed
from ray_nodes import needs_ray
from waits import SOON_IN_WORKER, one_loop, until

from fast_batcher import (
    DeadlineExceededError,
    DynBatcher,
    InferenceError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher.ray import RayWorkers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, one_loop]


@pytest.fixture(params=["process", pytest.param("actor", marks=needs_ray)], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of a worker. The cluster of actors outlives the tests."""
    if request.param == "actor":
        request.getfixturevalue("nodes")
    return str(request.param)


@pytest.fixture
def options(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options of a batcher whose worker is of the kind."""
    if kind == "process":
        return {}
    request.getfixturevalue("cluster")
    return {"workers": RayWorkers()}


async def test_worker_runs_all_stages_and_closes_its_model(
    options: dict[str, Any], tmp_path: Path
) -> None:
    async with DynBatcher(Contract, model_args=[str(tmp_path)], **options) as batcher:
        assert (await batcher.process_batched("a"))[0] == "a"
        with pytest.raises(KeyError, match="no such key") as raised:
            await batcher.process_batched("raise")
        assert isinstance(raised.value, InferenceError)
        assert "in infer" in str(raised.value.__cause__)
    assert (tmp_path / "closed").exists()


async def test_failed_load_is_a_startup_error_with_traceback(options: dict[str, Any]) -> None:
    batcher: DynBatcher[Any, Any] = DynBatcher(Contract, model_args=["", "no file"], **options)
    with pytest.raises(WorkerStartupError, match=r"could not load Contract: .*no file") as raised:
        await batcher.open()
    assert "in __init__" in str(raised.value.__cause__)
    await batcher.aclose()


async def test_worker_that_takes_too_long_is_replaced(
    options: dict[str, Any], tmp_path: Path
) -> None:
    options |= {"model_args": [str(tmp_path)], "infer_timeout": SOON_IN_WORKER}
    async with DynBatcher(Contract, **options) as batcher:
        _, before = await batcher.process_batched("a")
        with pytest.raises(DeadlineExceededError, match="infer_timeout"):
            await batcher.process_batched("hang")
        _, after = await batcher.process_batched("a")
        assert after != before


async def test_dead_worker_is_replaced(options: dict[str, Any]) -> None:
    async with DynBatcher(Placed, idempotent=False, **options) as batcher:
        _, before = await batcher.process_batched("a")
        with pytest.raises(WorkerLostError):
            await batcher.process_batched("die")
        _, after = await batcher.process_batched("a")
        assert after != before
        await until(lambda: batcher.stats.restarts == 1)


async def test_recycled_worker_has_a_successor_first(options: dict[str, Any]) -> None:
    async with DynBatcher(Placed, max_batches_per_worker=3, **options) as batcher:
        pids: set[int] = set()
        while len(pids) < 2:
            pids.add((await batcher.process_batched("a"))[1])
        assert batcher.stats.failed == 0
