"""What a batcher refuses at construction, before anything is started, and how it says so."""

import asyncio
import dataclasses
import functools
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from sample_models import (
    AsyncInfer,
    DuckModel,
    Echo,
    GeneratorInfer,
    Namespace,
    NoArgumentInfer,
    NoInfer,
    TwoArgumentInfer,
)
from waits import shown

from fast_batcher import ConfigurationError, DynBatcher, InferenceModel
from fast_batcher import settings as settings_module
from fast_batcher.settings import MAX_FRAME_BYTES, check_model, check_settings

ROOT = Path(__file__).parent.parent
# No process of these tests takes longer, in seconds, unless it hangs.
LIMIT = 60.0


def construct(model: Any = Echo, **settings: Any) -> DynBatcher[Any, Any]:
    """A batcher; there is no loop, so that it starts nothing."""
    return DynBatcher(model, **settings)


def refusal(model: Any = Echo, **settings: Any) -> str:
    """What is said when this is refused; it must be, and must have started nothing."""
    with pytest.raises(ConfigurationError) as caught:
        construct(model, **settings)
    assert multiprocessing.active_children() == []
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# Counts.

NOT_A_COUNT = [0, -1, 1.5, 8.0, True, False, "8", b"8", nan, [8], 1 + 0j, object]


@pytest.mark.parametrize(
    "name",
    [
        "max_batch_size",
        "num_workers",
        "max_queue_size",
        "max_queue_bytes",
        "max_batches_per_worker",
        "max_rss_bytes",
        "shared_memory_threshold",
    ],
)
@pytest.mark.parametrize("value", NOT_A_COUNT, ids=repr)
def test_a_count_is_a_whole_number_above_zero(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name}={value!r}: ")
    assert "1" in message.removeprefix(f"{name}={value!r}")


@pytest.mark.parametrize("value", [one for one in NOT_A_COUNT if one != 0 or one is False])
def test_no_restarts_are_a_choice_and_less_is_none(value: object) -> None:
    assert refusal(max_restarts=value).startswith(f"max_restarts={value!r}: ")
    construct(max_restarts=0)


@pytest.mark.parametrize(
    "value", [one for one in NOT_A_COUNT if one != 0 or one is False], ids=repr
)
def test_no_shared_memory_is_a_choice_and_less_is_none(value: object) -> None:
    assert refusal(max_shared_bytes=value).startswith(f"max_shared_bytes={value!r}: ")
    construct(max_shared_bytes=0)


def test_shared_memory_cannot_be_longer_than_a_file() -> None:
    assert refusal(max_shared_bytes=2**63) == (
        f"max_shared_bytes={2**63}: must be 0 to {2**63 - 1}"
    )
    construct(max_shared_bytes=2**63 - 1)


def test_there_must_be_memory_to_pin() -> None:
    assert refusal(pin_memory=True, max_shared_bytes=0) == (
        "pin_memory=True: with max_shared_bytes=0 there is no memory to pin; leave one of them out"
    )
    construct(pin_memory=True, max_shared_bytes=1)


def test_pinned_memory_alone_must_not_make_a_worker_too_large() -> None:
    settings: dict[str, Any] = {"pin_memory": True, "max_shared_bytes": 2**20}
    message = refusal(max_rss_bytes=2**20, **settings)
    assert message.startswith(f"max_rss_bytes={2**20}: with pin_memory=True all of max_shared_byte")
    construct(max_rss_bytes=2**20 + 1, **settings)
    construct(max_rss_bytes=2**20)


def test_the_memory_of_a_worker_can_be_limited_on_linux_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    construct(max_rss_bytes=1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refusal(max_rss_bytes=1).startswith("max_rss_bytes=1: the memory of a process")


@pytest.mark.parametrize("name", ["max_batch_size", "num_workers", "max_frame_bytes"])
def test_a_count_is_not_none(name: str) -> None:
    assert refusal(**{name: None}).startswith(f"{name}=None: give a whole number")


def test_the_second_argument_is_max_batch_size_and_the_third_max_delay() -> None:
    with pytest.raises(ConfigurationError, match=r"^max_batch_size=0: "):
        DynBatcher(Echo, 0)
    with pytest.raises(ConfigurationError, match=r"^max_delay=-1: "):
        DynBatcher(Echo, 1, -1)


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("max_batch_size", 10**9, 2**20),
        ("max_batch_size", 2**20 + 1, 2**20),
        ("num_workers", 1025, 1024),
    ],
)
def test_a_count_may_be_too_large(name: str, value: int, most: int) -> None:
    assert refusal(**{name: value}) == f"{name}={value}: must be 1 to {most}"


def test_the_largest_batch_and_the_smallest_frame_are_allowed() -> None:
    construct(max_batch_size=2**20, max_frame_bytes=2**20)


@pytest.mark.parametrize("value", [*NOT_A_COUNT, 2**20 - 1], ids=repr)
def test_a_frame_has_room_for_an_error_text(value: object) -> None:
    message = refusal(max_frame_bytes=value)
    assert message.startswith(f"max_frame_bytes={value!r}: ")
    assert str(2**20) in message


# Durations.

NOT_SECONDS = [-1, -0.001, nan, inf, -inf, 365 * 24 * 3600 + 1, 10**400, "10ms", "1", True, [1], 1j]


@pytest.mark.parametrize(
    "name",
    [
        "max_delay",
        "timeout",
        "infer_timeout",
        "max_latency",
        "start_timeout",
        "stop_timeout",
        "drain_timeout",
        "restart_window",
        "restart_backoff",
    ],
)
@pytest.mark.parametrize("value", NOT_SECONDS, ids=lambda value: f"{value!r:.20}")
def test_a_duration_is_a_number_of_seconds(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name}={value!r:.100}: ")
    assert "second" in message


@pytest.mark.parametrize(
    "name", ["timeout", "infer_timeout", "start_timeout", "restart_window", "restart_backoff"]
)
@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_no_time_at_all_is_not_enough(name: str, zero: float) -> None:
    assert (
        refusal(**{name: zero}) == f"{name}={zero!r}: must be more than 0 seconds, at most a year"
    )


@pytest.mark.parametrize("name", ["max_delay", "stop_timeout", "drain_timeout"])
@pytest.mark.parametrize("value", [0, 0.0, 365 * 24 * 3600.0])
def test_not_to_wait_is_a_choice(name: str, value: float) -> None:
    construct(**{name: value})


@pytest.mark.parametrize("name", ["max_delay", "stop_timeout", "drain_timeout"])
def test_a_negative_wait_is_not(name: str) -> None:
    assert refusal(**{name: -1}) == f"{name}=-1: must be 0 or more seconds, at most a year"


@pytest.mark.parametrize(
    "name",
    [
        "timeout",
        "infer_timeout",
        "max_delay",
        "max_queue_size",
        "max_queue_bytes",
        "max_restarts",
        "max_batches_per_worker",
        "max_rss_bytes",
        "max_latency",
    ],
)
def test_none_means_no_limit_or_the_default(name: str) -> None:
    construct(**{name: None})


@pytest.mark.parametrize("name", ["start_timeout", "stop_timeout", "drain_timeout"])
def test_the_end_of_starting_and_stopping_is_always_known(name: str) -> None:
    assert refusal(**{name: None}).startswith(f"{name}=None: give seconds")


# Words.


@pytest.mark.parametrize("value", ["Adaptive", "fastest", "", None, 1, ["greedy"], b"greedy"])
def test_a_policy_is_one_of_three_words(value: object) -> None:
    assert refusal(policy=value) == (
        f"policy={value!r}: choose one of 'adaptive', 'greedy', 'fixed'"
    )


@pytest.mark.parametrize("value", ["adaptive", "greedy", "fixed"])
def test_each_of_them_is_known(value: str) -> None:
    construct(policy=value, max_delay=0.01)


def test_a_fixed_window_needs_its_length() -> None:
    message = refusal(policy="fixed")
    assert message.startswith("max_delay=None: ")
    assert "policy='fixed'" in message


@pytest.mark.parametrize("name", ["auto_open", "idempotent", "isolate_errors", "pin_memory"])
@pytest.mark.parametrize("value", [None, 0, 1, "yes", [True]])
def test_a_switch_is_yes_or_no(name: str, value: object) -> None:
    assert refusal(**{name: value}) == f"{name}={value!r}: give True or False"


@pytest.mark.parametrize("value", ["", "  ", "two\nlines", "bell\a", 7, b"name", ["name"]])
def test_a_name_can_be_printed_on_one_line(value: object) -> None:
    message = refusal(name=value)
    assert message.startswith(f"name={value!r}: ")
    assert "printable" in message


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


# What follows from the settings.


def checked(**settings: Any) -> settings_module.Settings:
    defaults: dict[str, Any] = {
        "max_batch_size": 32,
        "max_delay": None,
        "num_workers": 1,
        "policy": "adaptive",
        "max_queue_size": None,
        "timeout": 30.0,
        "infer_timeout": None,
        "start_timeout": 300.0,
        "stop_timeout": 2.0,
        "drain_timeout": 20.0,
        "max_frame_bytes": MAX_FRAME_BYTES,
        "auto_open": True,
        "max_queue_bytes": None,
        "idempotent": True,
        "isolate_errors": True,
        "max_restarts": 5,
        "restart_window": 60.0,
        "restart_backoff": 0.1,
        "max_batches_per_worker": None,
        "max_rss_bytes": None,
        "max_latency": None,
        "max_shared_bytes": 512 * 2**20,
        "shared_memory_threshold": 16 * 2**10,
        "pin_memory": False,
    }
    return check_settings(**{**defaults, **settings})


def test_settings_arrive_as_they_were_given() -> None:
    given: dict[str, Any] = {
        "max_batch_size": 3,
        "max_delay": 0.5,
        "num_workers": 1,
        "policy": "fixed",
        "max_queue_size": 5,
        "timeout": None,
        "infer_timeout": 7,
        "start_timeout": 8.5,
        "stop_timeout": 9,
        "drain_timeout": 10.5,
        "max_frame_bytes": 2**21,
        "auto_open": False,
        "max_queue_bytes": 6,
        "idempotent": False,
        "isolate_errors": False,
        "max_restarts": 0,
        "restart_window": 7.5,
        "restart_backoff": 0.5,
        "max_batches_per_worker": 3,
        "max_rss_bytes": 10,
        "max_latency": 0.25,
        "max_shared_bytes": 9,
        "shared_memory_threshold": 8,
        "pin_memory": True,
    }
    assert vars(check_settings(**given)) == given


def test_the_settings_have_the_defaults_of_the_batcher() -> None:
    assert vars(checked()) == vars(settings_module.Settings())


def test_what_has_been_checked_does_not_change() -> None:
    spec = check_model(Echo, (), None, MAX_FRAME_BYTES)
    for checked_once in (checked(), spec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(checked_once, dataclasses.fields(checked_once)[0].name, 7)


@pytest.mark.filterwarnings("ignore:num_workers=:RuntimeWarning")
@pytest.mark.parametrize(
    ("max_batch_size", "num_workers", "room"),
    [(1, 1, 1024), (32, 1, 1024), (128, 1, 1024), (129, 1, 1032), (200, 4, 6400), (16, 9, 1152)],
)
def test_there_is_room_for_eight_batches_per_worker(
    max_batch_size: int, num_workers: int, room: int
) -> None:
    settings = checked(max_batch_size=max_batch_size, num_workers=num_workers)
    assert settings.max_queue_size == room


def test_a_queue_may_be_shorter_than_a_batch() -> None:
    assert checked(max_batch_size=32, max_queue_size=1).max_queue_size == 1


def test_more_workers_than_cores_are_a_warning_at_the_line_that_asked_for_them() -> None:
    cores = os.cpu_count() or 1
    with pytest.warns(RuntimeWarning, match=rf"num_workers={cores + 1} is more than the") as seen:
        DynBatcher(Echo, num_workers=cores + 1)
    assert [warning.filename for warning in seen] == [__file__]


def test_as_many_workers_as_cores_are_none() -> None:
    construct(num_workers=os.cpu_count() or 1)


# Models by name.


@pytest.mark.parametrize(
    "text",
    [
        "module",
        "module:",
        ":Class",
        ":",
        "",
        "a/b:C",
        "../x:C",
        "https://x:C",
        "a b:C",
        "a:C()",
        "a..b:C",
        ".a:C",
        "a.:C",
        "a:C.",
        "a:.C",
        "1a:C",
        "a:1C",
        "a:B:C",
        "a:C\n",
        " a:C",
        "a-b:C",
    ],
)
def test_a_model_string_is_module_colon_class(text: str) -> None:
    assert refusal(text) == (
        f"model={text!r}: write 'package.module:Class', as in 'app.models:Embedder'"
    )


@pytest.mark.parametrize("text", ["a:B", "_a1._b.c:_D", "app.models:Outer.Inner", "os:system"])
def test_a_model_string_is_not_looked_up_here(text: str) -> None:
    """That is the point of it: only the worker imports the model's module."""
    before = set(sys.modules)
    construct(text)
    assert set(sys.modules) == before


# Models by class.


class Abstract(InferenceModel[Any, Any]):
    """Does not implement `infer`."""


class HalfAbstract(Abstract):
    def warmup_inputs(self) -> Sequence[Any]:
        return [1]


class InferIsData:
    infer = 7


class InferIsNone(Echo):
    infer = None  # type: ignore[assignment]


class AsyncGeneratorInfer:
    async def infer(self, inputs: list[Any]) -> Any:
        yield inputs


class KeywordInfer:
    def infer(self, *, inputs: list[Any]) -> list[Any]:
        return inputs


class StaticWithoutArgument:
    @staticmethod
    def infer() -> list[Any]:
        return []


class StaticWithSelf:
    @staticmethod
    def infer(self: Any, inputs: list[Any]) -> list[Any]:
        return inputs


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (NoInfer, "it has no method infer(self, inputs)"),
        (int, "it has no method infer(self, inputs)"),
        (InferIsData, "it has no method infer(self, inputs)"),
        (InferIsNone, "it has no method infer(self, inputs)"),
        (InferenceModel, "it does not implement infer"),
        (Abstract, "it does not implement infer"),
        (HalfAbstract, "it does not implement infer"),
        (AsyncInfer, "infer is async; the worker has no event loop, write a plain def"),
        (AsyncGeneratorInfer, "infer is async; the worker has no event loop, write a plain def"),
        (GeneratorInfer, "infer is a generator; return a list with one output per input"),
    ],
)
def test_a_class_is_a_model(model: type, fault: str) -> None:
    assert refusal(model) == f"model={model!r}: {fault}"


@pytest.mark.parametrize(
    "model",
    [NoArgumentInfer, TwoArgumentInfer, KeywordInfer, StaticWithoutArgument, StaticWithSelf],
)
def test_infer_takes_the_list_of_inputs(model: type) -> None:
    message = refusal(model)
    assert message.startswith(f"model={model!r}: infer(")
    assert "exactly one argument besides self, the list of inputs" in message


class OptionalArgumentInfer:
    def infer(self, inputs: list[Any], temperature: float = 1.0) -> list[Any]:
        return inputs


class AnyArgumentsInfer:
    def infer(self, *args: Any, **kwargs: Any) -> list[Any]:
        return list(args[0])


class PositionalInfer:
    def infer(self, inputs: list[Any], /) -> list[Any]:
        return inputs


class StaticInfer:
    @staticmethod
    def infer(inputs: list[Any]) -> list[Any]:
        return inputs


class ClassMethodInfer:
    @classmethod
    def infer(cls, inputs: list[Any]) -> list[Any]:
        return inputs


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as frameworks have them."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class DecoratedInfer:
    @logged
    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


class SignatureUnknown:
    """Written in C, and so that its arguments cannot be asked for: the first call will tell."""

    infer = max


@pytest.mark.parametrize(
    "model",
    [
        Echo,
        DuckModel,
        Namespace.Inner,
        OptionalArgumentInfer,
        AnyArgumentsInfer,
        PositionalInfer,
        StaticInfer,
        ClassMethodInfer,
        DecoratedInfer,
        SignatureUnknown,
    ],
)
def test_whatever_can_be_called_with_the_list_is_a_model(model: type) -> None:
    construct(model)


def test_an_instance_is_not_a_class() -> None:
    message = refusal(Echo())
    assert message.startswith("model is an instance of Echo: give the class; ")
    assert "model_args" in message


@pytest.mark.parametrize("model", [lambda inputs: inputs, len, None, 7, b"a:B", ["a:B"]], ids=shown)
def test_what_is_neither_class_nor_string_is_no_model(model: object) -> None:
    assert refusal(model) == (
        f"model is of type {type(model).__name__}: give a subclass of InferenceModel or a "
        "'module:Class' string"
    )


def test_a_class_inside_a_function_cannot_be_imported_by_the_worker() -> None:
    class Local(Echo):
        pass

    message = refusal(Local)
    assert message.startswith(f"model={Local!r}: ")
    assert "inside a function" in message
    assert "top level of a module" in message


class Replaced(Echo):
    """Another object will have its name."""


Hidden = Replaced


def test_a_class_that_is_not_under_its_name_cannot_be_imported_by_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Replaced", None)
    message = refusal(Hidden)
    assert message.startswith(f"model={Hidden!r}: the worker process cannot import it (")
    assert "under its own name" in message


@pytest.mark.parametrize("where", ["-c", "-", "-m"])
def test_a_class_of_a_program_that_is_no_file_does_not_exist_in_the_worker(
    tmp_path: Path, where: str
) -> None:
    """A notebook's `__main__` has no file either; the one of a package is not run in a worker."""
    program = (
        "from fast_batcher import DynBatcher, InferenceModel\n"
        "class Cell(InferenceModel):\n"
        "    def infer(self, inputs): return inputs\n"
        "DynBatcher(Cell)\n"
    )
    if where == "-m":
        (tmp_path / "__main__.py").write_text(program)
        (tmp_path / "__init__.py").touch()
        done = run_python("-m", tmp_path.name, folder=tmp_path.parent)
    else:
        arguments = ("-c", program) if where == "-c" else ("-",)
        done = run_python(*arguments, program=program)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("fast_batcher.errors.ConfigurationError: model=<class ")
    assert "notebook" in last_line
    assert "put it into another .py file and import it from there" in last_line


def test_a_class_that_is_imported_at_a_prompt_does() -> None:
    program = (
        "import sys; sys.path.append('tests')\n"
        "from fast_batcher import DynBatcher\n"
        "from sample_models import Echo\n"
        "print(DynBatcher(Echo).state)\n"
    )
    done = run_python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "new\n", "")


def test_a_class_of_the_script_that_is_run_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from fast_batcher import DynBatcher, InferenceModel\n"
        "class Mine(InferenceModel):\n"
        "    def infer(self, inputs): return inputs\n"
        "if __name__ == '__main__':\n"
        "    print(DynBatcher(Mine).state)\n"
    )
    done = run_python(str(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, "new\n", "")


def run_python(
    *arguments: str, program: str = "", folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run it; `program` is what it reads from standard input."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=program,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


# Arguments of the model.


@pytest.mark.parametrize("value", ["weights.pt", b"weights", 7, None, {"a"}, {"a": 1}, iter(())])
def test_model_args_are_a_sequence(value: object) -> None:
    message = refusal(model_args=value)
    assert message.startswith(f"model_args is of type {type(value).__name__}: give a tuple, ")


@pytest.mark.parametrize("value", [["a"], ("a", 1), "a", 7])
def test_model_kwargs_are_a_mapping(value: object) -> None:
    assert refusal(model_kwargs=value) == (
        f"model_kwargs is of type {type(value).__name__}: give a dict with names as keys"
    )


@pytest.mark.parametrize(("value", "kind"), [({1: 2}, "int"), ({"a": 1, None: 2}, "NoneType")])
def test_model_kwargs_have_names_as_keys(value: object, kind: str) -> None:
    assert refusal(model_kwargs=value) == (
        f"model_kwargs has a key of type {kind}: give a dict with names as keys"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"model_args": "canary"},
        {"model_args": {"canary"}},
        {"model_kwargs": ["canary"]},
        {"model_kwargs": {b"canary": 1}},
        {"model_args": ("canary", threading.Lock())},
        {"model_kwargs": {"token": "canary", "lock": threading.Lock()}},
    ],
    ids=shown,
)
def test_an_error_shows_no_value_of_an_argument_of_the_model(arguments: dict[str, Any]) -> None:
    assert "canary" not in refusal(**arguments)


class RefusesPickling:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


@pytest.mark.parametrize("thing", [lambda: None, threading.Lock(), RefusesPickling()], ids=shown)
def test_arguments_that_cannot_be_pickled_are_named(thing: object) -> None:
    message = refusal(model_args=(thing, "weights.pt"))
    assert message.startswith(f"model_args of types ({type(thing).__name__}, str) and ")
    assert "cannot be pickled (" in message
    assert "load the thing in the model's __init__" in message
    message = refusal(model_kwargs={"thing": thing})
    assert f"model_kwargs of types {{thing: {type(thing).__name__}}}: they cannot" in message


def test_what_pickling_said_is_the_cause() -> None:
    with pytest.raises(ConfigurationError) as caught:
        construct(model_args=(RefusesPickling(),))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_arguments_that_are_larger_than_a_frame_are_refused() -> None:
    weights = bytes(2**20)
    message = refusal(model_args=(weights,), max_frame_bytes=2**20)
    assert message.startswith("model_args and model_kwargs take ")
    assert f"more than max_frame_bytes={2**20}" in message
    construct(model_args=(weights,), max_frame_bytes=2**20 + 4096)


def test_the_value_in_a_message_is_not_longer_than_a_line_or_two() -> None:
    message = refusal(model_args=set(range(10_000)))
    assert len(message) < 400


@pytest.mark.parametrize("model", [Echo, "sample_models:Echo"])
def test_the_worker_gets_model_and_arguments(model: Any) -> None:
    spec = check_model(model, ["weights.pt", 7], {"device": "cpu"}, MAX_FRAME_BYTES)
    assert spec.name == "Echo"
    assert pickle.loads(spec.pickled) == (model, ("weights.pt", 7), {"device": "cpu"})


def test_arguments_are_kept_as_they_were_at_construction() -> None:
    paths = ["first.pt"]
    spec = check_model(Echo, (paths,), None, MAX_FRAME_BYTES)
    paths.append("second.pt")
    assert pickle.loads(spec.pickled) == (Echo, (["first.pt"],), {})


# Under a running loop, where construction goes on to open.


def test_a_refused_batcher_does_not_open_later() -> None:
    async def construct_badly() -> None:
        with pytest.raises(ConfigurationError):
            DynBatcher(Echo, max_batch_size=0)
        # A batcher begins to open at the next turn of the loop.
        for _ in range(5):
            await asyncio.sleep(0)

    threads = threading.active_count()
    asyncio.run(construct_badly())
    assert multiprocessing.active_children() == []
    assert threading.active_count() == threads


def test_construction_leaves_the_start_method_alone() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    construct()
    assert multiprocessing.get_start_method(allow_none=True) == before
