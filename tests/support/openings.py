"""Access to the inside of a batcher, and batchers with both kinds of openings."""

import functools
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import psutil
import pytest
from shared_hosts import join_reapers
from waits import LIMIT

from fast_batcher import DynBatcher
from fast_batcher._host.client import RemoteOpening
from fast_batcher._opening.opening import LocalOpening
from fast_batcher.testing import BatcherKit

Make = Callable[..., DynBatcher[Any, Any]]


# The options of batchers whose workers are threads, processes, or processes of a host.
PLACES: dict[str, dict[str, Any]] = {
    "threads": {"workers": "threads"},
    "processes": {},
    "shared": {"shared": True},
}
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def opening_of(batcher: DynBatcher[Any, Any]) -> LocalOpening:
    """The opening of a batcher."""
    assert isinstance(batcher._opening, LocalOpening)
    return batcher._opening


def host_of(batcher: DynBatcher[Any, Any]) -> int:
    """The process of its host."""
    assert isinstance(batcher._opening, RemoteOpening)
    pid = batcher._opening._link.pid
    assert pid is not None
    return pid


def block_until_host_answers(batcher: DynBatcher[Any, Any]) -> None:
    """Block the event loop until the next bytes of the host are there."""
    assert isinstance(batcher._opening, RemoteOpening)
    channel = batcher._opening._link._channel
    assert channel is not None
    found, _, _ = select.select([channel._source], [], [], LIMIT)
    assert found


def pids_of(batcher: DynBatcher[Any, Any]) -> list[int]:
    """The processes of its workers."""
    if isinstance(batcher._opening, LocalOpening):
        return [one.pid for one in batcher._opening.pool.alive() if one.pid is not None]
    found = []
    for child in psutil.Process(host_of(batcher)).children():
        with suppress(psutil.Error):  # it has just ended
            # Not the resource tracker of Python.
            if any("spawn_main" in part for part in child.cmdline()):
                found.append(child.pid)
    return found


@pytest.fixture
def own_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test shares a host with another one; and those that it started are dead at its end."""
    directory = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
    yield
    join_reapers()
    shutil.rmtree(directory)


@pytest.fixture(params=[False, True], ids=["own", "shared"])
def make(request: pytest.FixtureRequest, own_directory: None) -> Make:
    """Makes the batchers of a test."""
    return functools.partial(DynBatcher, shared=request.param)


@pytest.fixture(params=["own", "shared", "kit", "threads"])
def make_any(request: pytest.FixtureRequest, own_directory: None) -> Iterator[Make]:
    """Makes batchers with workers of all kinds, for models that do not end their process."""
    options: dict[str, Any] = {"shared": request.param == "shared"}
    if request.param == "threads":
        options["workers"] = "threads"
    with BatcherKit() if request.param == "kit" else nullcontext():
        yield functools.partial(DynBatcher, **options)


def frames_of(make: Any, most_bytes: int) -> dict[str, Any]:
    """Return the option for the largest frame; threads have no frames."""
    is_thread = make.keywords.get("workers") == "threads"
    return {} if is_thread else {"max_frame_bytes": most_bytes}


def needs_pickling(make: Any) -> None:
    """Skip a test for threads, which get inputs and outputs as they are."""
    if make.keywords.get("workers") == "threads":
        pytest.skip("nothing is pickled")
