"""Arrays and tensors of every kind, there and back, in a program that may die of it."""

import sys

import pytest
from marks import long
from paths import SUPPORT
from programs import run_command

pytestmark = pytest.mark.slow

PROGRAM = SUPPORT / "array_kinds.py"


@pytest.mark.parametrize("way", ["shared", *long("pipe")])
def test_array_kinds_survive_or_raise_typed_errors(way: str) -> None:
    pytest.importorskip("torch")
    done = run_command([sys.executable, "-W", "ignore", str(PROGRAM), way])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
