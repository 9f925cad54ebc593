"""How many threads the numeric libraries of a worker may use, and what wins over that."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fast_batcher._parent.thread_limits import (
    THREAD_VARIABLES,
    read_quota,
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


def test_each_worker_gets_its_share_of_the_cores() -> None:
    cores = usable_cores()
    assert worker_environment({}, 1) == dict.fromkeys(THREAD_VARIABLES, str(cores))
    assert worker_environment({}, cores) == dict.fromkeys(THREAD_VARIABLES, "1")


def test_what_the_user_has_set_wins() -> None:
    environ = {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "", "OTHER": "kept"}
    environment = worker_environment(environ, 1)
    assert environment | environ == environment
    assert environment["OPENBLAS_NUM_THREADS"] == str(usable_cores())


def test_cores_are_those_that_this_thread_may_use() -> None:
    def limited_to_one() -> int:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return usable_cores()

    assert in_thread(limited_to_one) == 1
    assert usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", None),
        ("100000 100000\n", 1.0),
        ("150000 100000\n", 1.5),
        ("5000 100000\n", 0.05),
        ("", None),
        ("nonsense", None),
        ("x 100000", None),
    ],
)
def test_a_quota_file_tells_how_many_cores_a_container_has(
    tmp_path: Path, text: str, cores: float | None
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert read_quota(path) == cores
