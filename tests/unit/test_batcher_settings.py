"""The settings of a batcher: one table of what each takes and refuses, and where each is written.

A batcher is refused at construction, before anything is started.
"""

import dataclasses
import inspect
import multiprocessing
import os
import re
import sys
from math import inf, nan
from typing import Any, get_type_hints

import pytest
from models.base import Echo

from fast_batcher import ConfigurationError, DynBatcher
from fast_batcher.caching import LRUCache
from fast_batcher.observing import Observer
from fast_batcher.ray import RayWorkers
from fast_batcher.settings import BatcherOptions, Reconfiguration, Settings

YEAR = 365 * 24 * 3600
MEBI = 2**20


def construct(model: Any = Echo, **settings: Any) -> DynBatcher[Any, Any]:
    """A batcher; there is no loop, so that it starts nothing."""
    return DynBatcher(model, **settings)


def refusal(model: Any = Echo, **settings: Any) -> str:
    """Error message of rejected settings; nothing may have been started."""
    with pytest.raises(ConfigurationError) as caught:
        construct(model, **settings)
    assert multiprocessing.active_children() == []
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


class ARule:
    """A `BatchPolicy`."""

    def hold(self, *_: object) -> float:
        return 0.0


# The table.

NOT_A_COUNT = [-1, 1.5, 8.0, True, False, "8", b"8", nan, [8], 1 + 0j, object]
NOT_SECONDS = [-1, -0.001, nan, inf, -inf, YEAR + 1, 10**400, "10ms", "1", True, [1], 1j]
NOT_A_SWITCH = [0, 1, "yes", [True]]
NOT_A_FUNCTION = [7, "len", b"len"]
NOT_A_COST = [0, -1, -0.5, nan, inf, True, "8", [8], 1j]
NOT_A_NAME = ["", "  ", "two\nlines", "bell\a", 7, b"name", ["name"]]
NOT_A_POLICY = ["Adaptive", "fastest", "", 1, ["greedy"], b"greedy"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Values that a setting accepts besides its default, and values that it rejects."""

    taken: list[Any]
    refused: list[Any]
    # What every refusal says.
    remedy: str
    # Whether None is a value, which stands for no limit or for a default.
    none: bool = False


def count(least: int = 1, most: int | None = None, *, none: bool = False) -> Row:
    beyond = [] if most is None else [most + 1, 10 * most]
    largest = 10**12 if most is None else most
    refused = [*NOT_A_COUNT, least - 1, *beyond]
    return Row([least, largest], refused, f"{least} ", none)


def seconds(*, none: bool = False, zero: bool = False) -> Row:
    zeros = [0, 0.0, -0.0]
    return Row(
        [0.001, 1, YEAR, *(zeros if zero else [])],
        [*NOT_SECONDS, *([] if zero else zeros)],
        "second",
        none,
    )


SWITCH = Row([True, False], NOT_A_SWITCH, "give True or False")
FUNCTION = Row([len, str.islower, Echo], NOT_A_FUNCTION, "give a function of one input", none=True)
COST = Row([0.5, 1, 10**12], NOT_A_COST, "give a number from 1e-09 to 1e+21", none=True)

TABLE: dict[str, Row] = {
    "max_batch_size": count(1, 2**20),
    "max_delay": seconds(none=True, zero=True),
    "num_workers": Row(
        [1, 1024, (1, 8), (3, 3), (1, 1024)],
        [
            *NOT_A_COUNT,
            0,
            1025,
            (),
            (1,),
            (8, 1),
            (0, 2),
            (1, 1025),
            (1, 2, 3),
            (1.0, 2),
            (1, True),
        ],
        "give a whole number, 1 to 1024",
    ),
    "policy": Row(
        ["adaptive", "fixed", ARule()],
        [*NOT_A_POLICY, ARule],
        "one of 'adaptive', 'greedy', 'fixed'",
    ),
    "max_latency": seconds(none=True),
    "max_queue_size": count(none=True),
    "timeout": seconds(none=True),
    "infer_timeout": seconds(none=True),
    "auto_open": SWITCH,
    "name": Row(["the echo"], NOT_A_NAME, "give a printable", none=True),
    "cost": FUNCTION,
    "group_by": FUNCTION,
    "start_timeout": seconds(),
    "stop_timeout": seconds(zero=True),
    "drain_timeout": seconds(zero=True),
    "idempotent": SWITCH,
    "isolate_errors": SWITCH,
    "max_restarts": count(0, none=True),
    "restart_window": seconds(),
    "restart_backoff": seconds(),
    "max_batches_per_worker": count(none=True),
    "max_rss_bytes": count(none=True),
    "max_queue_bytes": count(none=True),
    "max_frame_bytes": count(MEBI),
    "max_batch_cost": COST,
    "max_request_cost": COST,
    "cost_is_padded": SWITCH,
    "max_shared_bytes": count(0, sys.maxsize),
    "shared_memory_threshold": count(4096, 65536),
    "freeze_gc": SWITCH,
    "observers": Row(
        [[], [Observer()]],
        [5, "text", Observer, [Observer]],
        "give a list of instances of fast_batcher.observing.Observer",
    ),
    "shared": Row(
        [True, False, "one name"],
        [0, 1, "", "  ", "two\nlines", b"name", ["name"]],
        "give True, False or a printable name",
    ),
    "shared_version": Row(["2026-11-25"], NOT_A_NAME, "give a printable", none=True),
    "devices": Row(
        ["auto", "cpu", "cpu:0", "cuda:7", ["cuda:0", "cuda:1"], ("cpu", "cuda:9")],
        [7, "", "gpu", "cuda", "cuda:-1", "cpu:", "cpu:x", [], [1], ["auto"], ["cpu", None]],
        'give "auto", "cpu", or a list like ["cuda:0", "cuda:1"]',
        none=True,
    ),
    "workers_per_device": count(1, 1024),
    "mps": SWITCH,
    "stage_threads": count(1, 1024, none=True),
    "enabled": SWITCH,
    "cache": Row(
        [LRUCache(1)], [7, "memory", {}, LRUCache], "give an object with get(key)", none=True
    ),
    "key": FUNCTION,
    "workers": Row(
        [RayWorkers(), RayWorkers(num_workers=2)],
        [2, "ray", RayWorkers, ["cpu"]],
        "a fast_batcher.ray.RayWorkers",
        none=True,
    ),
    "stepped": SWITCH,
    "max_sessions": count(),
}
# What some settings need beside them.
# Of a class that a text names it is not known what has an effect.
TEXT = {"model": "models.base:Echo"}
NEEDED: dict[str, dict[str, Any]] = {
    "max_batch_cost": {"cost": len},
    "max_request_cost": {"cost": len},
    "policy": {"max_delay": 0.01},
    "cost_is_padded": {"cost": len},
    **dict.fromkeys(("stage_threads", "stepped", "max_sessions"), TEXT),
    "workers_per_device": {"devices": "cpu"},
    "mps": {"devices": "cuda:0", "workers_per_device": 2},
    "key": {"cache": LRUCache(1)},
    "shared_version": {"shared": True},
}


def test_the_table_has_every_setting() -> None:
    assert sorted(TABLE) == sorted(field.name for field in dataclasses.fields(Settings))


@pytest.mark.filterwarnings("ignore:num_workers=:RuntimeWarning")
@pytest.mark.parametrize("name", TABLE)
def test_valid_values_are_accepted(name: str) -> None:
    row = TABLE[name]
    for value in (*row.taken, *([None] if row.none else [])):
        construct(**{**NEEDED.get(name, {}), name: value})


@pytest.mark.parametrize("name", TABLE)
def test_invalid_values_are_rejected_with_remedy(name: str) -> None:
    row = TABLE[name]
    for value in (*row.refused, *([] if row.none else [None])):
        message = refusal(**{**NEEDED.get(name, {}), name: value})
        assert message.startswith((f"{name}={value!r}: ", f"{name}={value!r:.100}: "))
        assert row.remedy in message.removeprefix(f"{name}={value!r}")
        assert len(message) < 250


async def a_coroutine(_: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": (1, 3), "devices": "cpu"}, r"num_workers=\(1, 3\): .*; omit num_workers"),
        (
            {"num_workers": 3, "devices": ["cuda:0", "cuda:1"]},
            "num_workers=3: .*; omit num_workers",
        ),
        (
            {"mps": True, "devices": "cuda:0"},
            "mps=True: .*; give workers_per_device=2",
        ),
        pytest.param(
            {"policy": ARule(), "shared": True},
            "policy=.*: it has no effect in the host process, .*; give a name",
            id="rule",
        ),
        (
            {"policy": "greedy", "max_delay": 0.01},
            "max_delay=0.01: it has no effect without holds; give another policy",
        ),
        ({"cost_is_padded": False}, "cost_is_padded=False: it has no effect without costs; give"),
        (
            {"max_sessions": 8},
            "max_sessions=8: it has no effect with a model without sessions; derive its class",
        ),
        (
            {"stage_threads": 2},
            "stage_threads=2: it has no effect with a model without stages; give it prepare",
        ),
        ({"stepped": True}, "stepped=True: Echo is no SteppedModel; omit it, or derive"),
        ({"policy": "fixed"}, "max_delay=None: policy='fixed' .* for example max_delay=0.01"),
        ({"max_batch_cost": 8}, "max_batch_cost=8: .*; give cost="),
        ({"workers_per_device": 2}, "workers_per_device=2: .*; give devices=, or num_workers="),
        pytest.param({"key": len}, "key=.*; give cache=", id="key"),
        # Without an id of its own the test's name would hold an address.
        pytest.param({"cost": a_coroutine}, "cost=.*; write a plain def", id="a coroutine"),
    ],
)
def test_a_refusal_names_setting_value_and_remedy(settings: dict[str, Any], message: str) -> None:
    """Settings that need or exclude others; the table has those of one setting."""
    assert re.match(message, refusal(**settings))


def test_max_rss_bytes_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refusal(max_rss_bytes=1).startswith("max_rss_bytes=1: the memory of a process")
    construct(max_rss_bytes=None)


# Where a setting is written: the dataclass, the constructor, the options and the documents.


def defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(Settings)}


def explicit() -> dict[str, inspect.Parameter]:
    """The settings in the constructor's signature."""
    parameters = dict(inspect.signature(DynBatcher).parameters)
    for name in ("model", "model_args", "model_kwargs", "options"):
        del parameters[name]
    return parameters


def test_constructor_and_settings_agree() -> None:
    types = get_type_hints(Settings)
    for options in (BatcherOptions, Reconfiguration):
        assert not options.__required_keys__
        for name, kind in get_type_hints(options).items():
            assert kind == types[name], name
    functions = {"cost", "group_by"}  # whose input has the type of the model's
    for name, parameter in explicit().items():
        assert name in functions or parameter.annotation == types[name], name
        assert parameter.default == defaults()[name], name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("drain_timout", ". Did you mean 'drain_timeout'?"),
        ("max_dealy", ". Did you mean 'max_delay'?"),
        ("max_batchsize", ". Did you mean 'max_batch_size'?"),
        ("max_batch_costs", ". Did you mean 'max_batch_cost'?"),
        ("batch_size", ". Did you mean 'max_batch_size'?"),
        ("workers_per_devices", ". Did you mean 'workers_per_device'?"),
        ("queue_size", ". Did you mean 'max_queue_size'?"),
        # It means another time than the name that it looks like.
        ("timeout_ms", ""),
        # Names of other libraries.
        ("batch_timeout", ". Did you mean 'max_delay', in seconds?"),
        ("max_wait_time", ". Did you mean 'max_delay', in seconds?"),
        ("max_latency_ms", ". Did you mean 'max_latency', in seconds?"),
        ("accelerator", ". Did you mean 'devices'?"),
        ("model_arg", ". Did you mean 'model_args'?"),
        ("colour", ""),
    ],
)
def test_unknown_option_error_suggests_a_name(name: str, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        construct(**{name: 1})
    message = f"DynBatcher() got an unexpected keyword argument '{name}'{hint}"
    assert str(caught.value) == message


# What follows from the settings.


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        (Echo, None, "Echo"),
        (Echo, "the echo", "the echo"),
        ("app.models:Embedder", None, "Embedder"),
        ("app.models:Outer.Inner", None, "Outer.Inner"),
    ],
)
def test_a_batcher_is_called_after_its_model(model: Any, name: str | None, expected: str) -> None:
    assert construct(model, name=name).name == expected


def test_excess_workers_warn_at_the_callers_line() -> None:
    cores = os.cpu_count() or 1
    construct(num_workers=cores)
    with pytest.warns(RuntimeWarning, match=rf"num_workers={cores + 1} is more than the") as seen:
        DynBatcher(Echo, num_workers=cores + 1)
    assert [warning.filename for warning in seen] == [__file__]


def test_default_queue_holds_batches_of_all_workers() -> None:
    settings = Settings(max_batch_size=256, num_workers=(1, 2))
    assert settings.queue_limit == 8 * 256 * 2
    more = settings.changed({"num_workers": 3})
    assert more.queue_limit == 8 * 256 * 3
    assert more.changed({"max_batch_size": 512}).queue_limit == 8 * 512 * 3
    # Its length was chosen.
    assert more.changed({"max_queue_size": 7}).changed({"num_workers": 4}).queue_limit == 7
