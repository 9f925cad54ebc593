"""Models and arguments that a batcher accepts, and errors for others."""

import functools
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models.base import Echo
from models.loading import AsyncInfer, GeneratorInfer, NoInfer
from paths import ROOT
from programs import run_command
from test_batcher_settings import construct, refusal
from waits import shown

from fast_batcher import ConfigurationError, DynBatcher, InferenceModel, batchable

# Hooks.


class Misspells(Echo):
    """Has names that look like hooks, and one that does not."""

    def warm_up_inputs(self) -> list[str]:
        return []

    def closes(self) -> None: ...

    def clone(self) -> None: ...

    def _close(self) -> None: ...


class HasBoth(Misspells):
    """Has the hooks as well."""

    def warmup_inputs(self) -> list[str]:
        return []

    def close(self) -> None: ...


def test_misspelt_hook_warns_at_constructor_call() -> None:
    with pytest.warns(RuntimeWarning) as seen:
        DynBatcher(Misspells)
    assert [warning.filename for warning in seen] == [__file__] * 2
    closes, warm_up = [str(warning.message) for warning in seen]
    assert "Misspells.closes looks like close" in closes
    assert "Misspells.warm_up_inputs looks like warmup_inputs" in warm_up
    DynBatcher(HasBoth)


# Models by name.


# fmt: off
WRONG_STRINGS = [
    "module", "module:", ":Class", ":", "", "a/b:C", "../x:C", "https://x:C", "a b:C", "a:C()",
    "a..b:C", ".a:C", "a.:C", "a:C.", "a:.C", "1a:C", "a:1C", "a:B:C", "a:C\n", " a:C", "a-b:C",
]
# fmt: on


@pytest.mark.parametrize("text", WRONG_STRINGS)
def test_a_model_string_is_module_colon_class(text: str) -> None:
    assert refusal(text) == (
        f"model={text!r}: write 'package.module:Class', as in 'app.models:Embedder'"
    )


# Models by class.


class Abstract(InferenceModel[Any, Any]):
    """Does not implement `infer`."""


class Predicts(InferenceModel[Any, Any]):
    """Has the name of LitServe's method."""

    def predict(self, inputs: Any) -> Any:
        return inputs


MODELS: list[type] = []


def model_with(infer: Any) -> type:
    """A model with this `infer`, under whose name it can be imported."""
    name = f"Model{len(MODELS)}"
    MODELS.append(type(name, (), {"infer": infer, "__module__": __name__}))
    globals()[name] = MODELS[-1]
    return MODELS[-1]


async def generate(_: Any, inputs: list[Any]) -> Any:
    yield inputs


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (NoInfer, "it has no method infer(self, inputs)"),
        (
            Predicts,
            "it does not implement infer; rename predict to infer, which gets the inputs of a "
            "batch as a list",
        ),
        (int, "it has no method infer(self, inputs)"),
        (model_with(7), "it has no method infer(self, inputs)"),
        (model_with(None), "it has no method infer(self, inputs)"),
        (InferenceModel, "it does not implement infer"),
        (Abstract, "it does not implement infer"),
        (AsyncInfer, "infer is async; the worker has no event loop, write a plain def"),
        (model_with(generate), "infer is async; the worker has no event loop, write a plain def"),
        (GeneratorInfer, "infer is a generator; return a list with one output per input"),
    ],
)
def test_a_class_is_a_model(model: type, fault: str) -> None:
    assert refusal(model) == f"model={model!r}: {fault}"


def method_named(name: str, method: Any) -> type:
    """A model with a batchable method of this name."""
    model = model_with(lambda self, inputs: inputs)
    setattr(model, name, batchable()(method))
    return model


def echo(self: Any, inputs: list[Any]) -> list[Any]:
    return inputs


async def echo_soon(self: Any, inputs: list[Any]) -> list[Any]:
    return inputs


def echo_each(self: Any, inputs: list[Any]) -> Iterator[Any]:
    yield from inputs


RESERVED = "cannot be the name of a batchable method: "


@pytest.mark.parametrize(
    ("name", "method", "fault"),
    [
        ("find", echo, f"find {RESERVED}the library has its own"),
        ("close", echo, f"close {RESERVED}the library has its own"),
        ("prepare", echo, f"prepare {RESERVED}the library has its own"),
        ("device", echo, f"device {RESERVED}the library has its own"),
        ("_methods", echo, f"_methods {RESERVED}it begins with an underscore"),
        ("__len__", echo, f"__len__ {RESERVED}it begins with an underscore"),
        ("embed", echo_soon, "embed is async; the worker has no event loop, write a plain def"),
        ("embed", generate, "embed is async; the worker has no event loop, write a plain def"),
        ("embed", echo_each, "embed is a generator; return a list with one output per input"),
        ("embed", lambda self: [], "embed(self) must take exactly one argument besides self"),
        ("embed", lambda self, inputs, k: [], "embed(self, inputs, k) must take exactly one"),
    ],
    ids=shown,
)
def test_a_batchable_method_is_checked_at_construction(name: str, method: Any, fault: str) -> None:
    model = method_named(name, method)
    assert refusal(model).startswith(f"model={model!r}: {fault}")


def test_methods_of_other_names_and_kinds_are_accepted() -> None:
    DynBatcher(method_named("embed", echo))
    DynBatcher(method_named("embed", staticmethod(lambda inputs: inputs)))


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as frameworks have them."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "infer",
    [
        lambda self: [],
        lambda self, inputs, more: [],
        lambda self, *, inputs: [],
        staticmethod(lambda: [None]),
        staticmethod(lambda self, inputs: []),
    ],
    ids=lambda infer: str(inspect.signature(infer)),
)
def test_infer_takes_the_list_of_inputs(infer: Any) -> None:
    model = model_with(infer)
    message = refusal(model)
    assert message.startswith(f"model={model!r}: infer(")
    assert "exactly one argument besides self, the list of inputs" in message


@pytest.mark.parametrize(
    "infer",
    [
        lambda self, inputs, temperature=1.0: inputs,
        lambda *args, **kwargs: args[0],
        lambda self, inputs, /: inputs,
        staticmethod(lambda inputs: inputs),
        classmethod(lambda cls, inputs: inputs),
        logged(lambda self, inputs: inputs),
        max,  # in C, and its arguments cannot be asked for: the first call will tell
    ],
)
def test_any_callable_infer_makes_a_model(infer: Any) -> None:
    construct(model_with(infer))


async def wait(self: Any, value: Any) -> Any:
    return value


def yields(self: Any, value: Any) -> Iterator[Any]:
    yield value


@pytest.mark.parametrize(
    ("stages", "fault"),
    [
        ({"prepare": lambda self: 1}, "prepare(self) must take exactly one argument besides self"),
        ({"finish": lambda self, a, b: 1}, "finish(self, a, b) must take exactly one argument"),
        ({"prepare": wait}, "prepare is async; the worker has no event loop, write a plain def"),
        ({"finish": yields}, "finish is a generator; return what the caller gets for it"),
        ({"finish": 5}, "finish is not a method; rename the attribute, or write finish(self, val"),
    ],
)
def test_a_stage_takes_one_value(stages: dict[str, Any], fault: str) -> None:
    model = type("InStages", (Echo,), stages)
    assert refusal(model).startswith(f"model={model!r}: {fault}")


@pytest.mark.parametrize("model", [lambda inputs: inputs, len, None, Echo(), ["a:B"]], ids=shown)
def test_model_must_be_class_or_string(model: object) -> None:
    message = refusal(model)
    assert message.startswith(
        f"model is of type {type(model).__name__}: give a subclass of InferenceModel or a "
        "'module:Class' string"
    )
    assert "model_args" in message


class Replaced(Echo):
    """Another object will have its name."""


Hidden = Replaced


def test_class_under_another_name_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Echo):
        pass

    monkeypatch.setattr(sys.modules[__name__], "Replaced", None)
    for model in (Hidden, Local):
        message = refusal(model)
        assert message.startswith(f"model={model!r}: the worker process cannot import it (")
        assert "to the top level of a module, under its own name" in message


@pytest.mark.slow
@pytest.mark.parametrize("where", ["-c", "-", "-m"])
def test_class_of_interactive_program_is_rejected(tmp_path: Path, where: str) -> None:
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


@pytest.mark.slow
def test_class_of_a_script_is_importable(tmp_path: Path) -> None:
    """One that is imported at a prompt, and one of the script that is run."""
    at_prompt = (
        "import sys; sys.path.append('tests/support')\n"
        "from fast_batcher import DynBatcher\n"
        "from models.base import Echo\n"
        "print(DynBatcher(Echo).state)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "from fast_batcher import DynBatcher, InferenceModel\n"
        "class Mine(InferenceModel):\n"
        "    def infer(self, inputs): return inputs\n"
        "if __name__ == '__main__':\n"
        "    print(DynBatcher(Mine).state)\n"
    )
    for done in (run_python("-c", at_prompt), run_python(str(script))):
        assert (done.returncode, done.stdout, done.stderr) == (0, "new\n", "")


def run_python(
    *arguments: str, program: str = "", folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run it; `program` is what it reads from standard input."""
    return run_command(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=program,
    )


# Arguments of the model.


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
def test_error_hides_values_of_model_arguments(arguments: dict[str, Any]) -> None:
    assert "canary" not in refusal(**arguments)


class RefusesPickling:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


@pytest.mark.parametrize("thing", [lambda: None, threading.Lock(), RefusesPickling()], ids=shown)
def test_arguments_that_cannot_be_pickled_are_named(thing: object) -> None:
    message = refusal(model_args=(thing, "weights.pt"))
    assert message.startswith(f"model_args of types ({type(thing).__name__}, str) and ")
    assert "cannot be pickled (" in message
    assert "load the object in the model's __init__" in message
    message = refusal(model_kwargs={"thing": thing})
    assert f"model_kwargs of types {{thing: {type(thing).__name__}}}: they cannot" in message
    with pytest.raises(ConfigurationError) as caught:
        construct(model_args=(thing,))
    assert caught.value.__cause__ is not None


def test_arguments_larger_than_a_frame_are_rejected() -> None:
    weights = bytes(2**20)
    message = refusal(model_args=(weights,), max_frame_bytes=2**20)
    assert message.startswith("model_args and model_kwargs take ")
    assert f"more than max_frame_bytes={2**20}" in message
    construct(model_args=(weights,), max_frame_bytes=2**20 + 4096)
