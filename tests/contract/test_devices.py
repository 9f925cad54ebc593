"""Workers on devices. No GPU is needed: a worker's environment and cores are what is tested."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from models.base import Echo
from models.ordinary import Placed
from paths import ROOT
from programs import run_command
from waits import until

from fast_batcher import ConfigurationError, DynBatcher
from fast_batcher._devices import find_gpus, find_missing, place_workers, share_cores

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def no_gpus_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


async def places(batcher: DynBatcher[Any, Any]) -> list[tuple[Any, ...]]:
    """Devices that the models found, by index."""
    found: dict[int, tuple[Any, ...]] = {}
    while len(found) < batcher.stats.num_workers:
        for index, *place in await batcher.process_many([None] * 16):
            found[index] = tuple(place)
    return [found[index] for index in sorted(found)]


@pytest.mark.anyio
@pytest.mark.slow
async def test_workers_get_devices_before_model_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa, MIG-bb,7")
    devices = ["cuda:1", "cuda:2", "cpu"]
    batcher = DynBatcher(Placed, max_batch_size=1, devices=devices, workers_per_device=2)
    async with batcher:
        found = await places(batcher)
        assert [place[1:3] for place in found] == 2 * [
            ("cuda:0", "MIG-bb"),
            ("cuda:0", "7"),
            ("cpu", ""),
        ]
        # A replacement has the device of its predecessor, whatever the environment has become.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        os.kill(found[1][0], signal.SIGKILL)
        await until(lambda: batcher.stats.restarts == 1)
        again = await places(batcher)
        assert again[1][0] != found[1][0]
        assert again[1][1:] == found[1][1:]


@pytest.mark.slow
def test_workers_of_a_host_have_their_devices() -> None:
    program = (
        "import asyncio\n"
        "from fast_batcher import DynBatcher\n"
        "async def main():\n"
        "    batcher = DynBatcher('models.ordinary:Placed', max_batch_size=1, shared=True,\n"
        "                         devices=['cpu', 'cuda:1'])\n"
        "    async with batcher:\n"
        "        found = set()\n"
        "        while len(found) < 2:\n"
        "            for place in await batcher.process_many([None] * 16):\n"
        "                found.add((place[0], *place[2:4]))\n"
        "        print(batcher.stats.num_workers, sorted(found))\n"
        "asyncio.run(main())\n"
    )
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}", "CUDA_VISIBLE_DEVICES": "5,6"}
    done = run_command([sys.executable, "-c", program], env=env)
    assert (done.stdout, done.stderr) == ("2 [(0, 'cpu', ''), (1, 'cuda:0', '6')]\n", "")


@pytest.mark.anyio
@pytest.mark.slow
async def test_workers_are_pinned_before_imports() -> None:
    devices = [f"cpu:{CORES[-1]}", f"cpu:{CORES[0]}-{CORES[0]}"]
    async with DynBatcher(Placed, max_batch_size=1, devices=devices) as batcher:
        found = await places(batcher)
    assert [place[3:] for place in found] == [([CORES[-1]], "1"), ([CORES[0]], "1")]
    assert sorted(os.sched_getaffinity(0)) == CORES


@pytest.mark.anyio
@pytest.mark.slow
async def test_environment_is_unchanged_without_devices() -> None:
    async with DynBatcher(Placed) as batcher:
        ((_, *place),) = await places(batcher)
    assert place[:3] == ["cpu", None, CORES]


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (1, [{1, 2, 4, 5, 7}]),
        (2, [{1, 2}, {4, 5, 7}]),
        (3, [{1}, {2, 4}, {5, 7}]),
        (5, [{1}, {2}, {4}, {5}, {7}]),
        (6, [None] * 6),
    ],
)
def test_cores_are_divided_evenly(count: int, shares: list[set[int] | None]) -> None:
    assert [share_cores({7, 5, 4, 2, 1}, index, count) for index in range(count)] == shares


def test_pinned_workers_of_one_device_share_its_threads() -> None:
    devices = [f"cpu:{','.join(map(str, CORES))}", "cuda:0"]
    pinned, gpu, *_ = place_workers(devices, 4, {})
    assert (pinned.cores, pinned.threads) == (frozenset(CORES), max(1, len(CORES) // 2))
    assert (gpu.cores, gpu.threads) == (None, None)


@pytest.mark.parametrize(
    ("visible", "names"),
    [("3", 1), ("GPU-a,MIG-b", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("NoDevFiles", 0)],
)
def test_cuda_visible_devices_limits_the_gpus(visible: str, names: int) -> None:
    assert len(find_gpus({"CUDA_VISIBLE_DEVICES": visible})) == names


def test_auto_device_falls_back_to_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, driver = tmp_path / "dev", tmp_path / "gpus"
    assert find_gpus({}, nodes, driver) == []
    (driver / "0000:01:00.0").mkdir(parents=True)
    assert find_gpus({}, nodes, driver) == ["cuda:0"]
    nodes.mkdir()
    for name in ("nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (nodes / name).touch()
    assert find_gpus({}, nodes, driver) == ["cuda:0", "cuda:1"]
    for visible, workers in (("", 1), ("4,5,6", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert DynBatcher(Echo, devices="auto").stats.num_workers == workers


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("cuda:2", "'cuda:2' counts from 0 in CUDA_VISIBLE_DEVICES='3,5', which has 2 devices"),
        ("cpu:0-9999", "'cpu:0-9999' names cores that this process may not use; it has "),
        ("cpu:1-0", "the range of 'cpu:1-0' ends before it begins"),
    ],
)
def test_missing_device_is_rejected(
    monkeypatch: pytest.MonkeyPatch, devices: str, message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with pytest.raises(ConfigurationError) as caught:
        DynBatcher(Echo, devices=devices)
    assert str(caught.value).startswith(f"devices=['{devices}']: {message}")


def test_gpus_that_the_machine_does_not_have_are_named(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert find_missing(["cuda:0", "cuda:9", "cpu", "cpu:0"], {}, tmp_path) == ["cuda:9"]
    assert find_missing(["cuda:9"], {"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == []
    (tmp_path / "kfd").touch()  # GPUs of AMD, which have other names
    assert find_missing(["cuda:9"], {}, tmp_path) == []


def test_missing_gpu_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    batcher = DynBatcher(Echo, devices=["cpu", "cuda:99"])
    (message,) = caplog.messages
    assert message.startswith("Echo: devices=['cpu', 'cuda:99']: this machine has ")
    assert message.endswith("the model would not find cuda:99")
    assert batcher.stats.num_workers == 2


def test_workers_are_pinned_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigurationError, match="pinned to cores on Linux only; give 'cpu'"):
        DynBatcher(Echo, devices=["cpu:0"])
