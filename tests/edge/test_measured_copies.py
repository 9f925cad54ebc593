"""`doctor` and `tune` measure a copy of a batcher: the same model, without the app's limits."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_models import Doubler
from limited_app import EVERY_OPTION, bare, limited
from programs import run_command
from server_load import URL
from servers import Server, get, serve
from shared_hosts import Hosts, hosts

from fast_batcher import DynBatcher
from fast_batcher._cli.model import (
    COPIED,
    TargetError,
    copy_batcher,
    copy_for_timing,
    select_inputs,
)
from fast_batcher.settings import OPTIONS

__all__ = ["hosts", "serve"]

HERE = Path(__file__).parent


def named(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.__name__ if callable(value) else value for name, value in values.items()}


def values_of(batcher: DynBatcher[Any, Any]) -> dict[str, Any]:
    return named({name: setting.value for name, setting in batcher.settings.items()})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-m", "fast_batcher", *arguments], cwd=HERE)


def test_the_limited_app_has_every_option() -> None:
    assert EVERY_OPTION.keys() == OPTIONS.keys()


def test_copy_has_the_copied_options_alone() -> None:
    """Also where variables set the others."""
    copy = values_of(copy_batcher(limited))
    copied = named({name: EVERY_OPTION[name] for name in COPIED})
    assert copy == values_of(copy_batcher(bare)) | copied
    assert copy["max_latency"] is None


def test_batches_of_a_timed_copy_hold_what_is_sent_together() -> None:
    """Whatever the inputs cost: they were packed before."""
    settings = {name: one.value for name, one in copy_for_timing(limited).settings.items()}
    assert settings["cost"](1000) == 1
    assert (settings["cost_is_padded"], settings["max_batch_cost"]) == (False, None)
    assert settings["policy"] == "greedy"


def test_options_from_outside_do_not_limit_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAST_BATCHER_MAX_LATENCY", "0.001")
    monkeypatch.setenv("FAST_BATCHER_MAX_BATCH_SIZE", "8")
    batcher = DynBatcher(Doubler)
    assert batcher.settings["max_latency"].value == 0.001
    copy = copy_batcher(batcher)
    assert (copy.settings["max_latency"].value, copy.settings["max_batch_size"].value) == (None, 8)


def test_workers_of_a_copy_take_the_devices_in_turn() -> None:
    batcher = DynBatcher(Doubler, devices=["cpu", "cpu:0"])
    for workers, devices in ((1, ["cpu"]), (3, ["cpu", "cpu:0", "cpu"])):
        settings = copy_batcher(batcher, workers).settings
        assert (settings["devices"].value, settings["num_workers"].value) == (devices, workers)


def test_inputs_of_the_largest_group_are_measured() -> None:
    batcher = DynBatcher(Doubler, group_by=lambda value: value % 2)
    assert select_inputs(batcher, [1, 2, 3, 4, 5]) == [1, 3, 5]
    assert select_inputs(DynBatcher(Doubler), [1, 2, 3]) == [1, 2, 3]
    with pytest.raises(TargetError, match="group_by raised TypeError"):
        select_inputs(batcher, ["text", None])


@pytest.mark.slow
def test_limits_change_no_result() -> None:
    found = []
    for name in ("bare", "limited"):
        target = (f"limited_app:{name}", "--inputs", "limited_app:INPUTS")
        done = run("doctor", *target, "--json")
        assert done.returncode == 0, done.stdout
        checks = {check["name"]: check for check in json.loads(done.stdout)}
        assert checks["batches"]["level"] == "good"
        assert all(f"t({size}) = " in checks["batches"]["text"] for size in (1, 2, 4, 8, 16))
        done = run("tune", *target, "--most", "16", "--json")
        assert done.returncode == 0, done.stderr
        advice = json.loads(done.stdout)["advice"]
        sizes = [one["max_batch_size"] for one in advice["candidates"]]
        found.append((sizes, advice["chosen"]["max_batch_size"]))
    assert found == [([1, 2, 4, 8, 16], 16)] * 2


@pytest.mark.slow
def test_live_server_gets_no_request(
    hosts: Hosts, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of the server counts the inputs that it computes for all processes.

    Server and commands have equal environments: an opened batcher would join the server's host.
    """
    monkeypatch.chdir(HERE)
    program = [str(HERE / "limited_app.py")]
    server = serve("", command=program, settings={"PYTHONPATH": os.environ["PYTHONPATH"]})
    url = server.wait_for(URL)[1]
    assert get(f"{url}/computed").json() == 1
    for command in ("doctor", "tune"):
        done = run(command, "limited_app:served", "--inputs", "limited_app:INPUTS")
        assert done.returncode == 0, done.stdout
    assert get(f"{url}/computed").json() == 2
    server.process.terminate()
    server.wait_for_exit()
