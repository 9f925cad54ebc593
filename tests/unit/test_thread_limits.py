"""Thread limits of a worker's numeric libraries, and their precedence."""

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.base import Echo

from fast_batcher import DynBatcher, _devices
from fast_batcher._devices import (
    THREAD_VARIABLES,
    list_control_groups,
    read_quota,
    thread_share,
    usable_cores,
    worker_environment,
)


def in_thread(function: Callable[[], Any]) -> Any:
    """Call in a thread of its own: the cores that a thread may use are its own affair."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_the_workers_of_all_batchers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices, "_claims", weakref.WeakKeyDictionary())
    monkeypatch.setattr(_devices, "usable_cores", lambda: 12)
    one, other = DynBatcher(Echo, devices=["cuda:0", "cuda:1"]), DynBatcher(Echo)
    shared = DynBatcher(Echo, shared=True, workers_per_device=9, devices="cpu")
    assert thread_share(2) == 4
    other.stop()
    assert thread_share(2) == 6
    one.stop()
    shared.stop()
    assert [thread_share(workers) for workers in (1, 5, 12, 13)] == [12, 2, 1, 1]
    ranged = DynBatcher(Echo, num_workers=(1, 2))
    assert thread_share(1) == 6
    ranged.reconfigure(num_workers=1)
    assert thread_share(1) == 12
    ranged.stop()


def test_user_settings_win() -> None:
    environ = {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "", "OTHER": "kept"}
    environment = worker_environment(environ, 3, None)
    assert environment | environ == environment
    # Every library reads the first unless it has its own.
    assert environment["OPENBLAS_NUM_THREADS"] == "7"
    nested = worker_environment({"OMP_NUM_THREADS": " 5,2"}, 3, None)
    assert (nested["OMP_NUM_THREADS"], nested["MKL_NUM_THREADS"]) == (" 5,2", "5")
    own = worker_environment({"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "7"}, 3, None)
    assert (own["OPENBLAS_NUM_THREADS"], own["MKL_NUM_THREADS"]) == ("3", "7")
    assert worker_environment({}, 3, "GPU-5") == {
        **dict.fromkeys(THREAD_VARIABLES, "3"),
        "CUDA_VISIBLE_DEVICES": "GPU-5",
    }


def test_cores_follow_the_threads_affinity() -> None:
    def limited_to_one() -> int:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return usable_cores()

    assert in_thread(limited_to_one) == 1
    assert usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "cores"), [("3", 3), ("64", 64)])
def test_python_is_told_the_number_of_cores(
    text: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_CPU_COUNT", text)
    assert usable_cores() == cores


@pytest.mark.parametrize("text", ["", "default", "0", "-1", "many"])
def test_other_counts_are_those_of_the_machine(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON_CPU_COUNT", raising=False)
    of_machine = usable_cores()
    monkeypatch.setenv("PYTHON_CPU_COUNT", text)
    assert usable_cores() == of_machine


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1.0),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "5000 100000\n"}, 0.05),
        ({"cpu.max": ""}, None),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu.max": "x 100000"}, None),
        ({"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"}, 2.5),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.cfs_quota_us": "250000\n"}, None),
        ({}, None),
    ],
)
def test_quotas_of_both_versions_are_read(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert read_quota(tmp_path) == cores


@pytest.mark.parametrize(
    ("own", "folders"),
    [
        ("0::/system.slice/model.service\n", ["system.slice/model.service", "system.slice", "."]),
        ("0::/\n", ["."]),
        (
            "4:cpu,cpuacct:/docker/5f\n3:memory:/docker/5f\n0::/init.scope\n",
            ["cpu/docker/5f", "cpu/docker", "cpu", "init.scope", "."],
        ),
        ("3:cpuset:/docker/5f\n", []),
        (None, []),
    ],
)
def test_control_groups_and_their_slices_are_found(
    tmp_path: Path, own: str | None, folders: list[str]
) -> None:
    membership = tmp_path / "cgroup"
    if own is not None:
        membership.write_text(own)
    assert [*list_control_groups("cpu", tmp_path, membership)] == [
        tmp_path / one for one in folders
    ]
