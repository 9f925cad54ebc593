"""Workers that share a GPU by MPS; a stand-in is the daemon, and no GPU is needed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models.base import Echo
from models.on_mps import Sharer
from nvidia_mps import MpsPrograms
from programs import Start, program
from waits import LIMIT, Gate, call, outcome, until

from fast_batcher import (
    ConfigurationError,
    DynBatcher,
    PoisonRequestError,
    WorkerStartupError,
)

__all__ = ["program"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MpsPrograms:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-aa")
    programs = MpsPrograms(tmp_path)
    monkeypatch.setenv("PATH", programs.path)
    return programs


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(str(tmp_path / "gate"))
    yield gate
    gate.close()


def make(folder: Path, **options: Any) -> DynBatcher[Any, Any]:
    given: Any = {"devices": "cuda:0", "workers_per_device": 2, "max_batch_size": 1, **options}
    return DynBatcher(Sharer, model_args=(str(folder),), mps=True, **given)


async def find_places(batcher: DynBatcher[Any, Any]) -> dict[int, tuple[Any, ...]]:
    """Answers of all workers, by process id."""
    found: dict[int, tuple[Any, ...]] = {}
    while len(found) < batcher.stats.num_workers:
        for pid, *place in await batcher.process_many([None] * 16):
            found[pid] = tuple(place)
    return found


@pytest.mark.parametrize("shared", [False, True])
async def test_each_gpu_has_a_daemon_of_its_own(
    mps: MpsPrograms, tmp_path: Path, *, shared: bool
) -> None:
    async with make(tmp_path, devices=["cuda:0", "cuda:1"], shared=shared) as batcher:
        found = sorted((await find_places(batcher)).values())
        daemons = mps.daemons()
        # The workers of a daemon count the GPUs that it sees.
        by_gpu = {gpu: name for name, (_, _, gpu) in daemons.items()}
        assert sorted(by_gpu) == ["3", "GPU-aa"]
        assert [(device, gpu) for device, gpu, *_ in found] == [
            *[("cuda:0", "0")] * 2,
            *[("cuda:0", "GPU-aa")] * 2,
        ]
        folders = [Path(directory).parent for _, _, directory, _ in found]
        assert [one.name for one in folders] == [by_gpu["3"]] * 2 + [by_gpu["GPU-aa"]] * 2
        watch = mps.watch()
    with watch:
        assert watch.survivors(LIMIT) == []
    await until(lambda: not any(one.exists() for one in folders))


async def test_workers_are_pinned_to_cores_of_their_own(mps: MpsPrograms, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    async with make(tmp_path) as batcher:
        shares = [share for *_, share in (await find_places(batcher)).values()]
        assert len(mps.daemons()) == 1
    assert set().union(*shares) == cores
    # On a machine with one core both workers have it.
    assert sum(map(len, shares)) == max(2, len(cores))


async def test_a_dead_daemon_is_replaced_before_the_next_worker(
    mps: MpsPrograms, tmp_path: Path
) -> None:
    async with make(tmp_path) as batcher:
        before = await find_places(batcher)
        ((first, (daemon, server, _)),) = mps.daemons().items()
        os.kill(daemon, signal.SIGKILL)
        # Its server goes on, and so do the workers.
        assert await find_places(batcher) == before
        os.kill(server, 0)
        os.kill(min(before), signal.SIGKILL)
        await until(lambda: batcher.stats.restarts == 1)
        after = await find_places(batcher)
        assert len(mps.daemons()) == 2
        assert len({directory for _, _, directory, _ in after.values()}) == 2
        assert first in str(after[max(before)])
        assert batcher.stats.failed == 0
        watch = mps.watch()
    with watch:
        assert watch.survivors(LIMIT) == []


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
async def test_daemons_end_with_the_app(
    mps: MpsPrograms, tmp_path: Path, program: Start, number: str
) -> None:
    running = program(
        f"""
        import models.on_mps

        async def main():
            batcher = DynBatcher(models.on_mps.Sharer, 1, model_args=({str(tmp_path)!r},),
                                 devices="cuda:0", workers_per_device=2, mps=True)
            async with batcher:
                tell((await batcher.process_batched(None))[3])
                # A forked copy must not keep the daemon alive.
                if os.fork() == 0:
                    tell("forked")
                    os.close(1)
                    os.close(2)
                    signal.pause()
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    directory = Path(running.tells()).parent
    assert running.tells() == "forked"
    with mps.watch() as watch:
        os.kill(running.pid, signal.Signals[number])
        assert watch.survivors(LIMIT) == []
    await until(lambda: not directory.exists())


async def test_workers_of_a_lost_device_are_replaced_together(
    mps: MpsPrograms, tmp_path: Path, held: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """No call is lost, and the worker without an error spends no restart."""
    options: dict[str, Any] = {"max_restarts": 1, "restart_window": 600.0, "restart_backoff": 0.01}
    async with make(tmp_path, **options) as batcher:
        before = await find_places(batcher)
        held_call = call(batcher, "hold")
        visit = await held.visit()
        faulty = await batcher.process_batched("fault")
        assert faulty[0] not in before
        again = await held.visit()
        assert again.pid not in before
        again.let_on()
        visit.let_on()
        assert (await held_call)[0] == again.pid
        await until(lambda: batcher.stats.workers_ready == 2)
        assert not before.keys() & (await find_places(batcher)).keys()
        assert (batcher.stats.failed, batcher.stats.restarts, len(mps.daemons())) == (0, 2, 1)
        assert "any more: CUDA error: an illegal memory access" in caplog.text


async def test_only_the_worker_with_the_error_spends_a_restart(
    mps: MpsPrograms, tmp_path: Path
) -> None:
    """The other one answers the request, although no restart is allowed."""
    async with make(tmp_path, max_restarts=0) as batcher:
        before = await find_places(batcher)
        assert (await batcher.process_batched("fault"))[0] not in before
        assert (batcher.state, batcher.stats.workers_ready) == ("open", 1)
        assert mps.daemons()


async def test_a_request_that_breaks_devices_is_given_up(mps: MpsPrograms, tmp_path: Path) -> None:
    async with make(tmp_path, restart_backoff=0.01) as batcher:
        assert isinstance(await outcome(call(batcher, "always")), PoisonRequestError)
        await until(lambda: batcher.stats.workers_ready == 2)
        assert len(await find_places(batcher)) == 2
        assert mps.daemons()


async def test_a_daemon_that_does_not_run_is_reported(
    mps: MpsPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "broken")
    with pytest.raises(WorkerStartupError, match=r"mps=True: .*'no such device'; omit mps"):
        await make(tmp_path).open()
    assert mps.daemons() == {}


@pytest.mark.parametrize("shared", [False, True])
async def test_missing_program_is_an_error_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    batcher = make(tmp_path, shared=shared)
    with pytest.raises(ConfigurationError, match=r"mps=True: there is no nvidia.*, or omit mps"):
        await batcher.open()
    await batcher.aclose()


@pytest.mark.parametrize("devices", ["auto", "cpu"])
@pytest.mark.parametrize("shared", [False, True])
async def test_workers_without_a_gpu_need_no_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str, *, shared: bool
) -> None:
    """The control program is missing, as on most machines without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    async with DynBatcher(
        Echo, devices=devices, workers_per_device=2, mps=True, shared=shared
    ) as batcher:
        assert await batcher.process_batched(1) == 1
