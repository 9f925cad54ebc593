"""Fault F53: large inputs and outputs where /dev/shm has 64 MB, as in a container, or is full.

In a mount namespace of its own, so that nothing else on the machine notices. And where files may
not be large.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import long
from paths import PYTHONPATH, ROOT
from programs import run_command

pytestmark = pytest.mark.slow


# Two batches at once have 192 MB, three times what there is, and come back.
PROGRAM = """
import asyncio, ctypes, logging, os, sys

if "memfd" in sys.argv[1]:
    del os.memfd_create
if sys.argv[1] == "no memfd at all":

    class OldLibrary(ctypes.CDLL):
        def __getattr__(self, name):
            if name == "memfd_create":
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = OldLibrary

import numpy as np
from fast_batcher import DynBatcher
from models.base import Echo
from models.large import Digests, digest

if sys.argv[1] == "full":
    free = os.statvfs("/dev/shm")
    with open("/dev/shm/all", "wb") as file:
        file.write(bytes(free.f_bavail * free.f_frsize))

async def main():
    before = os.listdir("/dev/shm")
    arrays = [np.full(6_000_000 // 4, number, np.float32) for number in range(32)]
    bodies = [bytes([number]) * 6_000_000 for number in range(32)]
    async with DynBatcher(Digests, 16) as batcher:
        for inputs in (arrays, bodies):
            found = await batcher.process_many(inputs)
            assert found == [digest(one) for one in inputs]
    async with DynBatcher(Echo, 16) as batcher:
        outputs = await batcher.process_many([{"pixels": one} for one in arrays])
        for one, other in zip(arrays, outputs, strict=True):
            assert np.array_equal(one, other["pixels"])
        rows = np.stack(arrays)
        assert np.array_equal(await batcher.process_rows(rows), rows)
    assert os.listdir("/dev/shm") == before

if __name__ == "__main__":
    size = os.statvfs("/dev/shm")
    assert size.f_blocks * size.f_frsize == 64 * 2**20, "not the small one"
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
    print("all is well")
"""
MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


def in_small_shm(*command: str) -> list[str]:
    """The same command where /dev/shm has 64 MB."""
    for flags in (["--mount"], ["--mount", "--map-root-user"]):
        start = ["unshare", *flags, "sh", "-c", MOUNT, "sh"]
        if (
            shutil.which("unshare")
            and subprocess.run([*start, "true"], check=False).returncode == 0
        ):
            return [*start, *command]
    pytest.skip("the kernel allows no mount namespace here, or there is no unshare(1)")


@pytest.mark.parametrize("what", ["full", "no memfd at all", *long("small", "no memfd in Python")])
def test_large_values_pass_with_little_shared_memory(what: str, tmp_path: Path) -> None:
    """Fault F53."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_command(
        in_small_shm(sys.executable, "-W", "error", str(program), what),
        env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr
    # One word of the pipe where nothing but /dev/shm is to be had. Else it went by the short way,
    # although more was sent than there is there.
    assert ("through a pipe" in done.stderr) == (what == "no memfd at all"), done.stderr
    assert ("No space left on device" in done.stderr) == (what == "no memfd at all"), done.stderr


LIMITED_WORKER = """
import asyncio, multiprocessing, sys
from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.errors import WorkerStartupError

class Lengths(InferenceModel):
    def infer(self, inputs):
        return [len(one) for one in inputs]

async def main():
    try:
        async with DynBatcher(Lengths, max_restarts=0):
            print("it has started")
    except WorkerStartupError as error:
        print(error)
    async with DynBatcher(Lengths, max_shared_bytes=2**24) as batcher:
        print(await batcher.process_batched(bytes(2**20)))

if __name__ == "__main__":
    multiprocessing.set_executable(sys.argv[1])
    asyncio.run(main())
"""


def test_limited_address_space_error_names_the_setting(tmp_path: Path) -> None:
    program, interpreter = tmp_path / "program.py", tmp_path / "python"
    program.write_text(LIMITED_WORKER)
    # KiB: half of what is shared unless it is set otherwise.
    interpreter.write_text(f'#!/bin/sh\nulimit -v 262144\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    done = run_command(
        [sys.executable, "-W", "error", str(program), str(interpreter)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    error, answer = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert "the worker cannot map all of max_shared_bytes; lower it" in error, done.stderr
    assert answer == str(2**20), done.stderr
