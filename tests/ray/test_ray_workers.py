"""Workers on a Ray cluster: answers, large inputs, logs, events, and the errors of an opening."""

import asyncio
import logging
import sys
from typing import Any

import numpy as np
import pytest
from models.on_ray import Complains, Doubles, NeedsModule, Placed
from ray_nodes import OTHER, RayCluster, needs_ray
from recorder import Recorder
from waits import LIMIT, Watch, assert_balance, one_loop, until

from fast_batcher import DynBatcher, InferenceError, WorkerStartupError
from fast_batcher.observing import WorkerChanged
from fast_batcher.ray import RayWorkers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_ray, one_loop]


async def test_two_actors_answer_and_end_with_the_batcher(
    cluster: RayCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fast_batcher")
    changes, loads_ray = Recorder(), "ray" in sys.modules
    workers = RayWorkers(2, scheduling_strategy="SPREAD")
    async with DynBatcher(Placed, 4, model_args=[0.01], workers=workers) as batcher:
        batcher.add_observer(changes)
        answers = await asyncio.gather(*[batcher.process_batched(at) for at in range(40)])
        assert [value for value, _ in answers] == [*range(40)]
        pids = {pid for _, pid in answers}
        assert len(pids) == 2
        assert assert_balance(batcher).num_workers == 2
        watch = Watch([*pids])
    # The host does, and this process does not.
    assert ("ray" in sys.modules) is loads_ray
    with watch:
        assert watch.survivors(LIMIT) == []
    ready = [record.getMessage() for record in caplog.records if "ready in" in record.msg]
    assert all(any(f"(pid {pid} on " in line for line in ready) for pid in pids)
    assert any(f"on {OTHER})" in line for line in ready)


async def test_batchers_that_share_have_the_same_actor(cluster: RayCluster) -> None:
    options: dict[str, Any] = {"shared": "test", "workers": RayWorkers()}
    async with DynBatcher(Placed, **options) as first, DynBatcher(Placed, **options) as second:
        assert await first.process_batched(1) == await second.process_batched(1)


async def test_model_writes_into_large_inputs_and_returns_them(cluster: RayCluster) -> None:
    inputs = [np.full(300_000, at, "int64") for at in range(20)]
    async with DynBatcher(Doubles, 8, workers=RayWorkers()) as batcher:
        for _ in range(3):
            outputs = await asyncio.gather(*map(batcher.process_batched, inputs))
            for at, output in enumerate(outputs):
                assert (output == 2 * at).all()
    assert (inputs[3] == 3).all()


async def test_records_and_events_name_the_node(
    cluster: RayCluster, caplog: pytest.LogCaptureFixture
) -> None:
    changes = Recorder()
    workers = RayWorkers(resources={f"at_{OTHER}": 1})
    async with DynBatcher(Complains, workers=workers, observers=[changes]) as batcher:
        assert await batcher.process_batched("good") == "good"
        with pytest.raises(ValueError, match="bad input") as raised:
            await batcher.process_batched("bad")
        assert isinstance(raised.value, InferenceError)
        await until(lambda: any(record.name == "models.on_ray" for record in caplog.records))
        await until(lambda: len(changes.of(WorkerChanged)) >= 2)
    record = next(record for record in caplog.records if record.name == "models.on_ray")
    assert record.getMessage() == "got good"
    ready = next(event for event in changes.of(WorkerChanged) if event.change == "ready")
    assert ready.node == OTHER
    assert vars(record)["worker_node"] == OTHER
    assert vars(record)["worker_pid"] == ready.pid


async def opening_error(model: Any, **options: Any) -> str:
    """The text of the error of an opening, which must come."""
    batcher: DynBatcher[Any, Any] = DynBatcher(model, **options)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(WorkerStartupError) as raised:
            await batcher.open()
    await batcher.aclose()
    return str(raised.value)


async def test_missing_cluster_error_names_start_command(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = await opening_error(Placed, workers=RayWorkers(address="127.0.0.1:9"))
    assert "there is no Ray cluster for this machine at address='127.0.0.1:9'" in error
    assert "ray start --address" in error


async def test_opening_without_ray_names_the_package(
    cluster: RayCluster, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no Ray here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = await opening_error(Placed, workers=RayWorkers())
    assert "cannot be imported (no Ray here)" in error
    assert "pip install 'fast_batcher[ray]'" in error


async def test_missing_module_error_names_runtime_env(cluster: RayCluster) -> None:
    error = await opening_error(NeedsModule, workers=RayWorkers())
    assert "has no module 'module_of_another_machine'" in error
    assert "runtime_env={'working_dir': '.'}" in error


async def test_unmet_demand_is_named_with_its_resources(cluster: RayCluster) -> None:
    workers = RayWorkers(num_gpus=2, placement_timeout=8.0)
    error = await opening_error(Placed, workers=workers)
    assert "had no node within placement_timeout=8 seconds" in error
    assert "{'CPU': 1, 'GPU': 2}; none of its 2 nodes has as much" in error


async def test_readiness_names_the_missing_resources(cluster: RayCluster) -> None:
    everything = RayWorkers(4)
    async with DynBatcher(Placed, workers=everything, name="first") as first:
        second: DynBatcher[Any, Any] = DynBatcher(Placed, workers=RayWorkers(), name="second")
        await second.open(wait_ready=False)
        await until(lambda: "are free" in second._status.waits_for)
        assert "1 actors wait for a node of the Ray cluster with {'CPU': 1}" in (
            second._status.waits_for
        )
        assert not second.is_ready
        await first.aclose()
        assert (await second.process_batched(1))[0] == 1
        await until(lambda: not second._status.waits_for)
        await second.aclose()
