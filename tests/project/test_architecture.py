"""The walls of the house: who imports whom, and what no file of ours may do.

Reads the source; where that cannot tell, starts a fresh interpreter and looks what it has loaded.
"""

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from programs import run_command

from fast_batcher._core.policy import GreedyPolicy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Limits

PACKAGE = "fast_batcher"

# From the ground up. A file imports from its own or a lower floor. Source: the design, section 3.
_NAMES = (
    "errors _devices _file_state _mps _process _version observing model sessions stepped stats "
    "settings configuration policy types ray encoding _independence _arrays _load",
    "_core",
    "_observers _transport _shared_memory",
    "_parent _worker _ray",
    "_identity _opening _host batcher caching _local dynamic inference aio testing",
    # The last two are other names for things inside, for users alone.
    "fastapi _cli __main__ opentelemetry prometheus pytest_plugin dyn_batcher inference_template",
)
FLOORS = {name: floor for floor, names in enumerate(_NAMES) for name in names.split()} | {"": 5}
LEAVES = 0
EDGE = 5
# Imports within the edge.
EDGE_IMPORTS = {("fastapi", ""), ("__main__", "_cli")}

# All that the core may use of Python: nothing of it waits, sends, logs or tells the time.
CORE_MAY_IMPORT = {
    *("abc", "bisect", "collections", "dataclasses", "enum", "heapq", "itertools", "math"),
    *("operator", "typing"),
}
MAY_IMPORT = {
    "_core": CORE_MAY_IMPORT,
    # The libraries of arrays are used where they are loaded. A tensor is read by its address.
    "_arrays": CORE_MAY_IMPORT
    | {*("ctypes", "functools", "importlib", "inspect", "pickle", "sys")},
}
# What no part of a worker may load: an event loop costs it time and memory, and has no use there.
NOT_IN_WORKER = {"asyncio", "fastapi", "starlette", "uvloop"}
NOT_OF_OURS_IN_WORKER = {"batcher", "_opening", "_parent", "fastapi"}
# What `import fast_batcher` must not load: whoever needs it has it and loads it himself.
HEAVY = {
    *("fastapi", "numpy", "opentelemetry", "prometheus_client", "pydantic", "ray", "starlette"),
    "torch",
}
# "__mp_main__" is another name that multiprocessing gives to "__main__".
PYTHON_AND_OURS = {*sys.stdlib_module_names, PACKAGE, "__main__", "__mp_main__"}
# Calls that are wrong everywhere in a library like this, and why.
FORBIDDEN_CALLS = {
    "time.time": "the wall clock jumps",
    "datetime.datetime.now": "the wall clock jumps",
    "multiprocessing.set_start_method": "it changes the whole program",
    "asyncio.get_event_loop": "it may make a loop that nobody closes",
    "asyncio.set_event_loop": "the loop is the program's",
    "asyncio.run": "the loop is the program's",
    "logging.basicConfig": "the program says where its log goes",
    "time.sleep": "nothing waits without being woken",
    "eval": "no text is code",
    "exec": "no text is code",
    "print": "the library logs",
}


# Files of tests that import private parts of the package which they do not test: those of
# tests/unit test one part each, and the others test by public names. The number only falls.
STRAYS = 63


@dataclass(frozen=True)
class Import:
    """One import statement's target, as a dotted name."""

    module: str
    line: int
    # Runs when the file is loaded: not inside a function, not for the type checker alone.
    is_eager: bool
    # For the type checker alone.
    is_typing: bool


@dataclass(frozen=True)
class Source:
    """A file of the package, parsed."""

    # Dotted, below the package: "_core.scheduler", "" for the package itself.
    name: str
    path: Path
    tree: ast.Module

    @property
    def part(self) -> str:
        """The first word of its name, which has a floor."""
        return self.name.partition(".")[0]

    def imports(self) -> Iterator[Import]:
        """Every import, wherever it stands."""
        yield from _imports_in(self.tree, is_eager=True, is_typing=False)


def _imports_in(node: ast.AST, *, is_eager: bool, is_typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, is_eager, is_typing)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            assert child.module is not None
            for alias in child.names:
                target = f"{child.module}.{alias.name}"
                module = target if _is_ours(target) else child.module
                yield Import(module, child.lineno, is_eager, is_typing)
        else:
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from _imports_in(
                child,
                is_eager=is_eager and not in_function and not for_types,
                is_typing=is_typing or for_types,
            )


def _is_ours(dotted: str) -> bool:
    return dotted.removeprefix(f"{PACKAGE}.") in SOURCES


def _read() -> dict[str, Source]:
    sources = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = Source(name, path, ast.parse(path.read_text()))
    return sources


SOURCES: dict[str, Source] = _read()
every_source = pytest.mark.parametrize("name", SOURCES)


def ours(target: Import) -> str | None:
    """The name below the package, None if it is not ours."""
    if target.module == PACKAGE:
        return ""
    inside = target.module.removeprefix(f"{PACKAGE}.")
    return None if inside == target.module else inside


def run_python(program: str, *options: str) -> Any:
    """Output of a fresh interpreter, as JSON."""
    done = run_command([sys.executable, *options, "-c", program])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def modules_after(statement: str, options: tuple[str, ...] = ("-I", "-S")) -> set[str]:
    """Modules loaded after a statement; by default the path has only Python and this package."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); {statement}\n"
        "import json; print(json.dumps(sorted(sys.modules)))"
    )
    modules = run_python(program, *options)
    assert isinstance(modules, list)
    return set(modules)


def top_levels(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


# Floors.


def test_frames_are_known_below_the_seam_alone() -> None:
    """A session hands batches over and takes outcomes; the host's own messages are frames, too."""
    know = {
        name
        for name, source in SOURCES.items()
        if any(ours(target) == "_transport.channels" for target in source.imports())
    }
    parts = {name for name in know if SOURCES[name].part not in ("_host", "_ray", "_transport")}
    assert parts == {"_parent.sending", "_parent.worker_process", "_worker.frames", "_worker.main"}


@every_source
def test_files_import_from_their_layer_or_below(name: str) -> None:
    """Each thing at the edge can be left out: it is imported by itself alone.

    So can the package's own `__init__` be left out, which the integration imports.
    """
    source = SOURCES[name]
    for target in source.imports():
        inside = ours(target)
        if inside is not None:
            part = inside.partition(".")[0]
            where = f"{source.path.name}:{target.line} imports {target.module}"
            assert FLOORS[part] <= FLOORS[source.part], where
            is_at_edge = FLOORS[part] == EDGE and part != source.part
            assert not is_at_edge or (source.part, part) in EDGE_IMPORTS, where


# What a leaf may import of the others; one that is not named: nothing.
LEAF_MAY_IMPORT: dict[str, set[str]] = {
    "settings": {"errors", "_devices", "observing", "policy", "types"},
    "configuration": {"errors", "settings"},
    "_devices": {"errors"},
    "_mps": {"_devices", "_process", "errors"},
    "encoding": {"_arrays.kinds"},
    "_independence": {"_arrays.kinds", "_arrays.trees"},
    "ray": {"errors", "settings"},
    "model": {"_arrays.collation", "_arrays.ragged", "errors", "settings", "types"},
    "sessions": {"model", "types"},
    "stepped": {"_arrays.outputs", "errors", "model", "types"},
    "_arrays": {"errors", "settings"},
    "_load": {"stats"},
}


@pytest.mark.parametrize("name", [name for name in SOURCES if FLOORS[SOURCES[name].part] == LEAVES])
def test_leaves_import_only_errors_and_leaves(name: str) -> None:
    inside = {inside for target in SOURCES[name].imports() if (inside := ours(target)) is not None}
    part = SOURCES[name].part
    like = {one for one in inside if one.partition(".")[0] == part}
    assert inside - like <= LEAF_MAY_IMPORT.get(part, set())


@pytest.mark.parametrize("name", [name for name in SOURCES if SOURCES[name].part in MAY_IMPORT])
def test_core_and_arrays_import_few_modules(name: str) -> None:
    for target in SOURCES[name].imports():
        assert ours(target) != "_process"
        if ours(target) is None:
            assert target.module.partition(".")[0] in MAY_IMPORT[SOURCES[name].part], (
                f"{SOURCES[name].path.name}:{target.line} imports {target.module}"
            )


def direct_imports(name: str) -> set[str]:
    """Modules of the package that a file imports when it is loaded."""
    found = set()
    for target in SOURCES[name].imports():
        inside = ours(target)
        if inside is not None and target.is_eager:
            assert inside in SOURCES, f"{target.module} is a module"
            found.add(inside)
    return found


def reachable_from(name: str) -> set[str]:
    """Modules of the package that are loaded because of a module, itself included."""
    reached: set[str] = set()
    todo = {name}
    while todo:
        one = todo.pop()
        reached.add(one)
        todo |= direct_imports(one) - reached
    return reached


# The core.


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("_core")])
def test_the_core_has_no_coroutines(name: str) -> None:
    kinds = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node for node in ast.walk(SOURCES[name].tree) if isinstance(node, kinds)]


def test_the_scheduler_alone_changes_its_parts() -> None:
    """Every event is a method of it, so that none can bring an expiry forward unseen."""
    scheduler = Scheduler(GreedyPolicy(), Limits(max_batch_size=1, max_queue_size=1))
    shown = {name for name in vars(scheduler) if not name.startswith("_")}
    assert shown == {"is_closed", "next_expiry", "service"}
    shells = [source for source in SOURCES.values() if source.part != "_core"]
    users = [
        node
        for source in shells
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("scheduler")
    ]
    assert "poll" in {node.attr for node in users}
    for node in users:
        is_read = isinstance(node.ctx, ast.Load)
        assert is_read, f"{ast.unparse(node)} is assigned"
        assert not node.attr.startswith("_"), ast.unparse(node)
    parts = {"_core.workers", "_core.sessions"}
    assert not {ours(target) for source in shells for target in source.imports()} & parts


def test_the_ledger_alone_gives_callers_their_outcomes() -> None:
    """Each outcome is counted once, and no caller that has gone harms another."""
    givers = {
        name
        for name, source in SOURCES.items()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("set_result", "set_exception")
        and ast.unparse(node.value).endswith("caller")
    }
    # The items of a decorated call end it; a call of many inputs may not reach a session.
    assert givers == {"_opening.ledger", "_local.opening", "_opening.calls"}


# The worker.


@pytest.mark.parametrize("name", ["_worker.main", "_ray.actor"])
def test_worker_loads_no_parent_code(name: str) -> None:
    reached = reachable_from(name)
    assert "_transport.channels" in reached
    assert not {name.split(".")[0] for name in reached} & NOT_OF_OURS_IN_WORKER
    for name in reached:
        modules = {target.module for target in SOURCES[name].imports() if not target.is_typing}
        assert not top_levels(modules) & NOT_IN_WORKER


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        # What a spawned process loads before it loads the model; and what a model's file loads.
        "import multiprocessing.spawn, fast_batcher._worker.main",
        "from fast_batcher import InferenceModel, errors",
    ],
)
def test_a_worker_has_no_event_loop(statement: str) -> None:
    loaded = modules_after(statement)
    assert not top_levels(loaded) & (NOT_IN_WORKER | HEAVY)
    assert not loaded & {f"{PACKAGE}.{name}" for name in NOT_OF_OURS_IN_WORKER}


def test_host_and_actor_alone_import_ray() -> None:
    importers = {
        source.part
        for source in SOURCES.values()
        if "ray" in top_levels({target.module for target in source.imports()})
    }
    assert importers == {"_ray"}


# The package.


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-I", "-S"), ()], ids=["Python alone", "all is installed"])
def test_importing_loads_only_the_standard_library(options: tuple[str, ...]) -> None:
    # What is installed may load more of its own when the interpreter starts.
    before = modules_after("pass", options)
    loaded = modules_after("from fast_batcher import DynBatcher", options)
    assert f"{PACKAGE}.batcher" in loaded
    assert top_levels(loaded - before) <= PYTHON_AND_OURS


@pytest.mark.slow
@pytest.mark.parametrize("module", ["dynamic", "inference", "aio", "aio.inference"])
def test_decorators_load_no_process_code(module: str) -> None:
    loaded = modules_after(f"import fast_batcher.{module}")
    assert f"{PACKAGE}._local.decorated" in loaded
    assert top_levels(loaded) <= PYTHON_AND_OURS
    assert not loaded & {f"{PACKAGE}.batcher", f"{PACKAGE}._parent", f"{PACKAGE}._worker"}
    assert not top_levels(loaded) & {*HEAVY, "multiprocessing"}


@pytest.mark.slow
def test_importing_starts_nothing_and_changes_nothing() -> None:
    # With ctypes, some builds of libffi keep their own file open.
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import asyncio, ctypes, json, logging, multiprocessing, os, signal, threading, time\n"
        "def look():\n"
        "    handlers = [str(signal.getsignal(n)) for n in signal.valid_signals()]\n"
        "    descriptors = sorted(os.listdir('/proc/self/fd'))\n"
        "    method = multiprocessing.get_start_method(allow_none=True)\n"
        "    logs = [str(h) for h in logging.getLogger().handlers]\n"
        "    return [handlers, descriptors, method, logs, threading.active_count(),\n"
        "            dict(os.environ)]\n"
        "before = look()\n"
        "import fast_batcher; fast_batcher.DynBatcher\n"
        "import fast_batcher._parent.pool\n"
        "print(json.dumps([before, look()]))"
    )
    before, after = run_python(program)
    assert after == before


# Every file.


def test_no_class_overrides_what_its_base_calls_in_the_constructor() -> None:
    """The method would run before the attributes of its own class are there."""
    classes = {
        node.name: node
        for source in SOURCES.values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }

    def list_bases(node: ast.ClassDef) -> list[ast.ClassDef]:
        names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        own = [classes[name] for name in names if name in classes]
        return own + [base for one in own for base in list_bases(one)]

    def list_methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
        return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}

    found = []
    for name, node in classes.items():
        for base in list_bases(node):
            begin = list_methods(base).get("__init__", ast.Pass())
            used = {
                each.attr
                for each in ast.walk(begin)
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
            }
            found += [f"{name}.{method}" for method in used & list_methods(node).keys()]
    assert "LocalOpening" in classes
    assert found == []


@every_source
def test_forbidden_functions_are_not_called(name: str) -> None:
    # A command is a program, and so is a test: the loop is its own.
    is_program = SOURCES[name].part in ("_cli", "_load", "testing")
    allowed = ["asyncio.run"] if is_program else []
    assert [use for use in forbidden_uses(SOURCES[name].tree) if use not in allowed] == []


def test_private_parts_are_imported_by_their_own_tests() -> None:
    strays = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        imports = _imports_in(ast.parse(path.read_text()), is_eager=True, is_typing=False)
        names = {ours(one) for one in imports} - {None}
        parts = {str(name).partition(".")[0] for name in names if str(name).startswith("_")}
        if len(parts) > (path.parent.name == "unit"):
            strays.append(str(path.relative_to(ROOT)))
    assert len(strays) == STRAYS, "\n".join(strays)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import time\ntime.time()", "time.time"),
        ("import time as clock\nclock.time()", "time.time"),
        ("from time import time\nnow = time()", "time.time"),
        ("from time import time as now", "time.time"),
        ("import multiprocessing as mp\nmp.set_start_method('fork')", "set_start_method"),
        ("import asyncio\nget = asyncio.get_event_loop", "get_event_loop"),
        ("from datetime import datetime\ndatetime.now()", "datetime.now"),
        ("print('here')", "print"),
    ],
)
def test_the_search_for_it_finds_it(program: str, found: str) -> None:
    """A check that cannot find anything would be worse than none."""
    (use,) = set(forbidden_uses(ast.parse(program)))
    assert found in use


def forbidden_uses(tree: ast.Module) -> list[str]:
    """Every use of a forbidden name, under whatever name it was imported."""
    meanings: dict[str, str] = {}
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                meanings[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                uses.append(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, _, rest = ast.unparse(node).partition(".")
            uses.append(".".join(filter(None, [meanings.get(first, first), rest])))
    return [use for use in uses if use in FORBIDDEN_CALLS]
