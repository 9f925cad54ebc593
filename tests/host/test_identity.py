"""Keys of hosts: which processes share a host, and what they must have in common."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import PYTHONPATH
from programs import run_command

from fast_batcher._host.identity import make_key, read_start_time

# Prints the scope of the default key.
TELL_SCOPE = (
    "from fast_batcher._host.identity import make_key\n"
    "print(make_key({shared!r}, b'', None, 'Model').scope)"
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
def test_siblings_share_a_scope_and_others_share_a_name(
    shared: bool | str, is_one_scope: bool
) -> None:
    assert tell_scope(shared) == tell_scope(shared)
    assert (tell_scope(shared) == tell_scope(shared, *CHILD_OF_A_SHELL)) is is_one_scope


@pytest.mark.parametrize(
    ("shared", "name"), [("one", "Model"), ("two", "Other"), ("", "Model"), (True, "Other")]
)
def test_scopes_differ_by_the_name_given_and_by_the_batchers_name(
    shared: bool | str, name: str
) -> None:
    key = make_key(shared, b"", None, name)
    assert key.scope not in {make_key(other, b"", None, "Model").scope for other in (True, "two")}


def test_the_supervisor_is_the_parent_and_a_named_scope_has_none() -> None:
    assert make_key(True, b"", None, "Model").supervisor == os.getppid()
    assert make_key("name", b"", None, "Model").supervisor is None
    assert read_start_time(os.getppid()) == read_start_time(os.getppid())
    assert read_start_time(0) is None


def write_longer(file: Path, _: pytest.MonkeyPatch) -> bytes:
    file.write_text("longer")
    os.utime(file, ns=(1, 1))
    return b"settings"


def touch(file: Path, _: pytest.MonkeyPatch) -> bytes:
    os.utime(file, ns=(2, 2))
    return b"settings"


def remove(file: Path, _: pytest.MonkeyPatch) -> bytes:
    file.unlink()
    return b"settings"


def change_payload(_: Path, __: pytest.MonkeyPatch) -> bytes:
    return b"other settings"


def change_directory(file: Path, patch: pytest.MonkeyPatch) -> bytes:
    patch.chdir(file.parent)
    return b"settings"


def delete_working_directory(file: Path, patch: pytest.MonkeyPatch) -> bytes:
    gone = file.parent / "gone"
    gone.mkdir()
    patch.chdir(gone)
    gone.rmdir()
    return b"settings"


def choose_device(_: Path, patch: pytest.MonkeyPatch) -> bytes:
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    return b"settings"


def extend_path(_: Path, patch: pytest.MonkeyPatch) -> bytes:
    patch.syspath_prepend("/a name that is not UTF-8: \udcff")
    return b"settings"


@pytest.mark.parametrize(
    "change",
    [
        write_longer,
        touch,
        remove,
        change_payload,
        change_directory,
        delete_working_directory,
        choose_device,
        extend_path,
    ],
)
def test_the_fingerprint_changes_with_all_that_a_host_depends_on(
    change: Callable[[Path, pytest.MonkeyPatch], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file = tmp_path / "model.py"
    file.write_text("short")
    os.utime(file, ns=(1, 1))
    before = make_key(True, b"settings", str(file), "Model")
    assert make_key(True, b"settings", str(file), "Model") == before
    after = make_key(True, change(file, monkeypatch), str(file), "Model")
    assert after.fingerprint != before.fingerprint
    assert after.scope == before.scope
