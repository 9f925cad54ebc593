"""Arrays and tensors of every kind, there and back, in a program that may die of it."""

import subprocess
import sys

import pytest
from paths import SUPPORT
from waits import LIMIT

pytestmark = pytest.mark.slow

PROGRAM = SUPPORT / "array_kinds.py"


@pytest.mark.parametrize("way", ["pipe", "shared"])
def test_every_kind_of_array_and_tensor_comes_back_as_it_was_or_is_a_typed_error(way: str) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), way],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
