"""Keys of hosts: which processes share a host, and what they must have in common."""

import json
import os
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pydantic
import pytest
import torch
from models.base import Echo
from paths import PYTHONPATH
from programs import run_command

from fast_batcher._file_state import MOST_FILES, read_state
from fast_batcher._host.identity import list_differences, make_key, read_start_time
from fast_batcher._host.link import find_key
from fast_batcher._identity import (
    MOST_PATHS,
    digest,
    identify_model,
    identify_reloaded,
    list_paths,
)
from fast_batcher.model import check_model
from fast_batcher.settings import Settings

# Prints the scope of the default key.
TELL_SCOPE = (
    "from fast_batcher._host.identity import make_key\n"
    "print(make_key({shared!r}, {{}}, None, 'Model').scope)"
)


def tell_scope(shared: bool | str, *shell: str) -> str:
    command = [*shell, sys.executable, "-c", TELL_SCOPE.format(shared=shared)]
    done = run_command(command, env={**os.environ, "PYTHONPATH": PYTHONPATH})
    assert done.returncode == 0, done.stderr
    return done.stdout


# A parent between this process and the program; `true` keeps it from becoming the program.
CHILD_OF_A_SHELL = ("sh", "-c", '"$@"; true', "sh")


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "is_one_scope"), [(True, False), ("name", True)])
def test_siblings_share_a_scope(shared: bool | str, is_one_scope: bool) -> None:
    assert tell_scope(shared) == tell_scope(shared)
    assert (tell_scope(shared) == tell_scope(shared, *CHILD_OF_A_SHELL)) is is_one_scope


@pytest.mark.parametrize(
    ("shared", "name"), [("one", "Model"), ("two", "Other"), ("", "Model"), (True, "Other")]
)
def test_scopes_differ_by_both_names(shared: bool | str, name: str) -> None:
    key = make_key(shared, {}, None, name)
    assert key.scope not in {make_key(other, {}, None, "Model").scope for other in (True, "two")}


def test_only_unnamed_scopes_have_a_supervisor() -> None:
    assert make_key(True, {}, None, "Model").supervisor == os.getppid()
    assert make_key("name", {}, None, "Model").supervisor is None
    assert read_start_time(os.getppid()) == read_start_time(os.getppid())
    assert read_start_time(0) is None


def write_longer(file: Path, _: pytest.MonkeyPatch) -> None:
    file.write_text("longer")
    os.utime(file, ns=(1, 1))


def touch(file: Path, _: pytest.MonkeyPatch) -> None:
    os.utime(file, ns=(2, 2))


def remove(file: Path, _: pytest.MonkeyPatch) -> None:
    file.unlink()


def change_directory(file: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(file.parent)


def delete_working_directory(file: Path, patch: pytest.MonkeyPatch) -> None:
    gone = file.parent / "gone"
    gone.mkdir()
    patch.chdir(gone)
    gone.rmdir()


def choose_device(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CUDA_VISIBLE_DEVICES", "")


def set_variable(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("A_VARIABLE", "/a value that is not UTF-8: \udcff")


def remove_variable(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("REMOVED")


def extend_path(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.syspath_prepend("/a name that is not UTF-8: \udcff")


def add_argument(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "argv", [*sys.argv, "--port=2"])


AFFINITY, FILE = "the CPU affinity", "the file of the model's module"
DIRECTORY, COMMAND = "the working directory", "the command line"


@pytest.mark.parametrize(
    ("change", "facet"),
    [
        (write_longer, FILE),
        (touch, FILE),
        (remove, FILE),
        (change_directory, DIRECTORY),
        (delete_working_directory, DIRECTORY),
        (choose_device, "the environment variable CUDA_VISIBLE_DEVICES"),
        (set_variable, "the environment variable A_VARIABLE"),
        (remove_variable, "the environment variable REMOVED"),
        (extend_path, "sys.path"),
        (add_argument, COMMAND),
    ],
)
def test_key_changes_with_each_facet_of_a_process(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    facet: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("REMOVED", "")
    file = tmp_path / "model.py"
    file.write_text("short")
    os.utime(file, ns=(1, 1))
    before, named = [make_key(shared, {}, str(file), "Model") for shared in (True, "name")]
    assert make_key(True, {}, str(file), "Model") == before
    change(file, monkeypatch)
    after = make_key(True, {}, str(file), "Model")
    assert after.fingerprint != before.fingerprint
    assert after.scope == before.scope
    assert list_differences(before.facets, after.facets) == [facet]
    # Programs that share a name may have other arguments, and nothing else.
    after_named = make_key("name", {}, str(file), "Model")
    assert (after_named == named) is (facet == COMMAND)


def test_key_does_not_depend_on_how_a_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = make_key(True, {}, None, "Model")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    sys.path[0] = f"{link}/../{tmp_path.name}"
    program = os.fsdecode(spawn.get_executable())
    directory, name = os.path.split(program)
    try:
        spawn.set_executable(f"{directory}/../{os.path.basename(directory)}/{name}")
        assert make_key(True, {}, None, "Model") == before
    finally:
        spawn.set_executable(program)


def test_key_changes_with_the_cores_of_a_process() -> None:
    before, cores = make_key(True, {}, None, "Model"), os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("this process has one core")
    try:
        os.sched_setaffinity(0, {min(cores)})
        after = make_key(True, {}, None, "Model")
    finally:
        os.sched_setaffinity(0, cores)
    assert list_differences(before.facets, after.facets) == [AFFINITY]
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize(
    "name",
    [
        *("SHLVL", "TERM_SESSION_ID", "HOSTNAME", "PORT", "SUPERVISOR_PROCESS_NAME"),
        *("INVOCATION_ID", "LISTEN_FDS", "GUNICORN_PID", "GUNICORN_FD"),
    ],
)
def test_variables_of_supervisors_do_not_change_a_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_key(True, {}, None, "Model")
    monkeypatch.setenv(name, "of this process alone")
    assert make_key(True, {}, None, "Model") == before


def test_instances_of_pm2_have_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its apps do not, which may have other variables."""
    keys = []
    for number, app in (("0", "app"), ("1", "app"), ("2", "other")):
        own = {"pm_id": number, "pm_uptime": f"17958{number}", "restart_time": number}
        own |= {"instance_var": "NUMBER", "NUMBER": number, "pm_pid_path": f"/pids/{number}"}
        for name, value in {**own, "name": app}.items():
            monkeypatch.setenv(name, value)
        keys.append(make_key("name", {}, None, "Model"))
    assert keys[0] == keys[1]
    differences = list_differences(keys[1].facets, keys[2].facets)
    assert differences == ["the environment variable name"]
    # Without PM2 names in lower case are like all others.
    for name in ("pm_id", "restart_time"):
        monkeypatch.delenv(name)
    before = make_key("name", {}, None, "Model")
    monkeypatch.setenv("restart_time", "2")
    after = make_key("name", {}, None, "Model")
    assert list_differences(before.facets, after.facets) == [
        "the environment variable restart_time"
    ]


# --- the batcher and the model --------------------------------------------------------------------


@dataclass
class Weights:
    """Arguments that are pickled by their state."""

    labels: set[str]
    steps: dict[str, Any]


class Body(pydantic.BaseModel):
    """Has a set of the fields that were given."""

    first: str = ""
    second: int = 0
    third: set[str] = set()


class Labels(set[str]):
    """A set with a class of its own."""


def make_arguments() -> dict[str, Any]:
    """Values that are equal in all processes, and whose pickles are not."""
    labels = {"cat", "dog", "cow", "pig"}
    shared = [*"ab"]
    circle: list[Any] = [labels]
    circle.append(circle)
    return {
        "set": labels,
        "frozenset": (frozenset(labels),),
        "set of a class": Labels(labels),
        "dict of a set": dict.fromkeys(labels),
        "default dict": defaultdict(set, {label: {label} for label in labels}),
        "dataclass": Weights(labels, dict.fromkeys(labels)),
        "pydantic": Body(first="1", second=1, third=labels),
        "namespace": SimpleNamespace(labels=labels),
        "partial": partial(sorted, labels),
        "circle": circle,
        "one object twice": [shared, shared],
        "objects": numpy.array([labels, None], dtype=object),
        "fields": numpy.zeros(2, [("a", "i4"), ("b", "f8")]),
        "array": numpy.arange(6).reshape(2, 3).T,
        "tensor": torch.arange(3),
        "half": torch.ones(2, 2, dtype=torch.bfloat16).T,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "module": torch.nn.ReLU(),
        "dtype": torch.float16,
        "path": Path("/models"),
        "pattern": re.compile("a+"),
        "enum": re.IGNORECASE,
        "function": len,
        "bound method": dict.fromkeys(labels).get,
        "masked": numpy.ma.array([1, 2], mask=[False, True]),
        "conjugate": torch.full((1,), 1j).conj(),
        "strided": torch.arange(7)[::2][:1],
    }


# The keys of inputs follow the order of dicts, which has here the order of a set.
ORDERED = {"dict of a set", "default dict", "dataclass", "bound method"}
TELL_DIGESTS = (
    "import json, test_identity as own\n"
    "from fast_batcher._identity import digest, digest_input\n"
    "made = own.make_arguments()\n"
    "told = {name: digest(one) for name, one in made.items()}\n"
    "told |= {f'input {name}': digest_input(made[name]) for name in made.keys() - own.ORDERED}\n"
    "print(json.dumps(told))"
)


@pytest.mark.slow
def test_equal_values_have_one_digest_in_all_processes() -> None:
    path = os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])
    told = []
    for seed in ("1", "2", "3"):
        env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        done = run_command([sys.executable, "-c", TELL_DIGESTS], env=env)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    assert told[0] == told[1] == told[2]
    assert len({*told[0].values()}) == len(told[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", b"1"),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        ({"a": 1}, {"a": 2}),
        ({"a": "b"}, {"b": "a"}),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (numpy.zeros(2, "f4"), numpy.zeros(2, "i4")),
        (numpy.zeros((2, 1)), numpy.zeros((1, 2))),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.zeros(2), numpy.zeros(2, "f4")),
        (Weights(set(), {}), Weights({"a"}, {})),
        (Weights, Body),
        ({"a": 1}.get, {"a": 2}.get),
        (dict.fromkeys, OrderedDict.fromkeys),
        (numpy.ma.array([1, 2], mask=[False, True]), numpy.ma.array([1, 999999])),
        (torch.ones(1, dtype=torch.complex64).conj(), torch.full((1,), 1j).conj()),
        (torch.full((1,), 1j).conj().imag, torch.full((1,), 2j).conj().imag),
    ],
)
def test_different_arguments_have_different_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    ("options", "arguments", "differences"),
    [
        ({"max_delay": 0.5}, (1, {"a"}), ["max_delay"]),
        ({"shared_version": "2"}, (1, {"a"}), ["shared_version"]),
        ({"cost": len}, (1, {"a"}), ["cost"]),
        ({}, (1, {"b"}), ["model_args[1]"]),
        ({}, (1,), ["model_args[1]"]),
        ({}, (1, {"a"}), []),
    ],
)
def test_key_names_settings_and_arguments_that_differ(
    options: dict[str, Any], arguments: tuple[Any, ...], differences: list[str]
) -> None:
    keys = [
        find_key(check_model("models:Model", args, None, 2**20), Settings(**given), "Model")
        for args, given in (
            ((1, {"a"}), {"shared": True}),
            (arguments, {"shared": True, **options}),
        )
    ]
    assert list_differences(keys[0].facets, keys[1].facets) == differences
    assert (keys[0] == keys[1]) is (not differences)


def test_paths_are_found_in_nested_arguments() -> None:
    circle: list[Any] = [Path("/models"), {"a": ("/weights", 1, b"/bytes")}]
    circle.append(circle)
    assert list_paths((circle, "/models")) == ["/models", "/weights"]
    words = [f"word {number}" for number in range(2 * MOST_PATHS)]
    paths = list_paths((words, "/models"))
    assert len(paths) == MOST_PATHS
    assert "/models" in paths


def test_folder_trees_are_checked_in_part(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "file").touch()
    assert len(read_state(str(tmp_path)) or ()) == 1
    for number in range(MOST_FILES):
        (tmp_path / f"{number}").mkdir()
    assert read_state(str(tmp_path)) == ()


# --- the identity of a model ----------------------------------------------------------------------


def make_spec(*arguments: Any, model: Any = "models.base:Echo", in_threads: bool = False) -> Any:
    return check_model(model, arguments, None, 2**20, in_threads=in_threads)


def identify(*arguments: Any, version: str | None = None, **given: Any) -> str:
    return identify_model(make_spec(*arguments, **given), version).identity


def test_identity_tells_models_apart(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_text("old")
    path = str(weights)
    known = [
        identify(),
        identify(1),
        identify(path),
        identify(model="models.base:Other"),
        identify(model="models.ordinary:Echo"),
        identify(version="2"),
    ]
    weights.write_text("newer")
    known.append(identify(path))
    assert len({*known}) == len(known)
    assert identify(Path(path)) != identify(path)
    # A class and its name are one model.
    assert identify(model=Echo) == identify() == known[0]
    assert "-" not in "".join(known)


def test_identity_depends_on_the_code_and_not_on_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "some_code.py"
    found: list[str] = []
    for code in ("a = 1", "a = 1", "a = 2"):
        file.write_text(code)
        os.utime(file, (len(found), len(found)))
        found.append(identify(model="some_code:Model"))
    assert found[0] == found[1] != found[2]


def test_a_model_without_a_file_has_an_identity_of_its_own() -> None:
    assert identify(model="no_such_module:Model") != identify(model="no_such_module:Model")
    one = identify(model="no_such_module:Model", version="1")
    assert one == identify(model="no_such_module:Model", version="1")

    class Local(Echo):
        """A class that no other process has."""

    for model, argument in ((Local, 1), (Echo, lambda: None)):
        spec = make_spec(argument, model=model, in_threads=True)
        other = make_spec(argument, model=model, in_threads=True)
        named = identify_model(spec, "1")
        assert named.identity != identify_model(other, "1").identity
        # Another opening of the same batcher finds its outputs.
        assert named.identity == identify_model(named, "1").identity


def test_a_reload_without_a_visible_change_has_another_identity() -> None:
    present = identify_model(make_spec("name"), None)
    again = identify_reloaded(make_spec("name"), present, None)
    assert again.identity != present.identity
    assert identify_reloaded(make_spec("name"), again, None).identity != again.identity
    # A mark stays: the batcher may return to arguments that have meant another model before.
    other = identify_reloaded(make_spec("other"), again, None)
    assert identify_reloaded(make_spec("name"), other, None).identity == again.identity
    # With a visible change the identity is that of the new model.
    assert identify_reloaded(make_spec("other"), present, None).identity == identify("other")
