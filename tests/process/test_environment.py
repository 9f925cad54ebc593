"""How many threads the numeric libraries of a worker may use, and what is left of that here."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fast_batcher._process import environment
from fast_batcher._process.environment import (
    THREAD_VARIABLES,
    limited_threads,
    read_quota,
    usable_cores,
)


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def thread_limits() -> dict[str, str]:
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


def in_thread(function: Callable[[], Any]) -> Any:
    """Call in a thread of its own: the cores that a thread may use are its own affair."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_each_worker_gets_its_share_of_the_cores() -> None:
    cores = usable_cores()
    with limited_threads(1):
        assert thread_limits() == dict.fromkeys(THREAD_VARIABLES, str(cores))
    with limited_threads(cores):
        assert thread_limits() == dict.fromkeys(THREAD_VARIABLES, "1")


def test_no_worker_gets_less_than_one_thread() -> None:
    with limited_threads(10 * usable_cores()):
        assert thread_limits() == dict.fromkeys(THREAD_VARIABLES, "1")


def test_the_environment_is_restored() -> None:
    before = dict(os.environ)
    with limited_threads(1):
        assert dict(os.environ) != before
    assert dict(os.environ) == before
    with pytest.raises(ZeroDivisionError), limited_threads(1):
        raise ZeroDivisionError
    assert dict(os.environ) == before


def test_what_the_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MKL_NUM_THREADS", "")
    with limited_threads(1):
        limits = thread_limits()
    assert (limits["OMP_NUM_THREADS"], limits["MKL_NUM_THREADS"]) == ("7", "")
    assert limits["OPENBLAS_NUM_THREADS"] == str(usable_cores())
    assert thread_limits() == {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": ""}


def test_two_batchers_that_start_together_take_turns() -> None:
    """The second would restore what the first has set, not what the user had."""
    entered: list[int] = []

    def enter(number: int) -> None:
        with limited_threads(number):
            assert environment._environ_lock.locked()
            entered.append(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in (1, 2)]
    with limited_threads(1):
        for thread in threads:
            thread.start()
        assert entered == []
    for thread in threads:
        thread.join()
    assert sorted(entered) == [1, 2]
    assert thread_limits() == {}


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


def test_without_a_quota_file_there_is_no_quota(tmp_path: Path) -> None:
    assert read_quota(tmp_path / "none") is None
    assert read_quota(tmp_path) is None
