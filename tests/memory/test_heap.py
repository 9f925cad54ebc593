"""Memory of large blocks stays with the process."""

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

COUNT_FAULTS = """
import resource, sys
from fast_batcher._shared_memory.ranges import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [bytearray(b"x" * 2**21) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")
def test_freed_blocks_are_used_again_without_page_faults() -> None:
    command = [sys.executable, "-c", COUNT_FAULTS]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    before, after = map(int, shown.split())
    assert after < before / 10
