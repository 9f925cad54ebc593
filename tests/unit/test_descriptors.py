"""Numbers and inheritance of the library's file descriptors."""

import os
import subprocess
import sys

import pytest
from programs import run_command

from fast_batcher._process import PassedDescriptor

# Which of the numbers 0 to 2 are free; a program of its own, for these are this one's streams.
FREE = [(), (1,), (0, 2), (0, 1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("free", FREE)
def test_standard_stream_numbers_stay_reserved(free: tuple[int, ...]) -> None:
    program = f"""
import os, socket
from fast_batcher._process import occupy_stdio
telling = os.dup(1)
for number in {free}:
    os.close(number)
occupy_stdio()
files = os.listdir("/proc/self/fd")
occupy_stdio()
assert os.listdir("/proc/self/fd") == files
with socket.socket() as other:
    assert other.fileno() > 2
for number in {free}:
    assert os.readlink(f"/proc/self/fd/{{number}}") == "/dev/null"
    assert not os.get_inheritable(number)
    assert os.read(number, 1) == b""
    assert os.write(number, b"lost") == 4
os.write(telling, b"done")
"""
    done = run_command(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "done")


def test_passed_descriptor_is_not_inherited_further() -> None:
    fd = os.dup(0)
    os.set_inheritable(fd, True)
    assert PassedDescriptor(fd).detach() == fd
    assert not os.get_inheritable(fd)
    os.close(fd)
