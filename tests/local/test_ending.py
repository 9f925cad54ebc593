"""The end of programs that have forgotten to shut their functions down."""

import signal

import pytest
from programs import run_program

pytestmark = pytest.mark.slow

# `double` returns something whose end takes its time and is written to stdout. PyTorch gives up the
# GIL while it frees tensors, and aborts the process if the interpreter ends meanwhile.
SLOWLY_FREED = """
import os, sys, time

class Rows(list):
    def __del__(self, write=os.write, sleep=time.sleep):
        sleep(0.2)
        write(1, b"freed\\n")

def rows(items):
    return Rows([2 * item for item in items])
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('the program')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_batch_is_freed_before_interpreter_exit(ending: str, code: int) -> None:
    done = run_program(
        SLOWLY_FREED
        + "from fast_batcher import dynamically\n"
        + "double = dynamically(rows)\n"
        + "os.write(1, b'%d\\n' % double(21))\n"
        + ending
    )
    assert (done.returncode, done.stdout) == (code, "42\nfreed\n")
    assert ("Traceback" in done.stderr) == (code in (1, -signal.SIGINT))


def test_calling_daemon_threads_do_not_abort_exit() -> None:
    """They are refused, and may say so on stderr; a tensor of theirs could abort it by itself."""
    pytest.importorskip("torch")
    done = run_program(
        "import threading, torch\n"
        "from fast_batcher import dynamically\n"
        "begun = threading.Event()\n"
        "@dynamically\n"
        "def multiply(items):\n"
        "    begun.set()\n"
        "    products = [torch.ones(200, 200) @ torch.ones(200, 200) for _ in items]\n"
        "    return [0 for _ in products]\n"
        "def call():\n"
        "    while True:\n"
        "        multiply(1)\n"
        "for _ in range(4):\n"
        "    threading.Thread(target=call, daemon=True).start()\n"
        "begun.wait()\n"
    )
    assert done.returncode == 0


def test_exit_waits_only_for_the_running_batch() -> None:
    done = run_program(
        "import os, threading, time\n"
        "from fast_batcher import dynamically\n"
        "from fast_batcher._local.opening import is_exiting\n"
        "begun = threading.Event()\n"
        "@dynamically(batch_size=1)\n"
        "def sleep(items):\n"
        "    begun.set()\n"
        "    while not is_exiting(): time.sleep(0.001)\n"
        "    time.sleep(0.2)\n"
        "    os.write(1, b'computed\\n')\n"
        "    return items\n"
        "def call():\n"
        "    try:\n"
        "        sleep([1, 2, 3])\n"
        "    except Exception:\n"
        "        pass\n"
        "threading.Thread(target=call, daemon=True).start()\n"
        "begun.wait()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "computed\n", "")


def test_blocking_function_does_not_prevent_exit() -> None:
    done = run_program(
        "import logging, threading, time\n"
        "from fast_batcher import dynamically\n"
        "logging.basicConfig()\n"
        "begun = threading.Event()\n"
        "@dynamically\n"
        "def sleep(items):\n"
        "    if items != [0]: begun.set(); time.sleep(3600)\n"
        "    return items\n"
        "print(sleep(0))\n"
        "threading.Thread(target=sleep, args=(1,), daemon=True).start()\n"
        "begun.wait()\n"
    )
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert done.stderr.startswith("WARNING:fast_batcher:fast_batcher sleep: the program ends")
    assert "Traceback" not in done.stderr


def test_exit_hooks_are_answered_until_shutdown() -> None:
    """A hook that was registered before the import runs after the threads have ended."""
    done = run_program(
        "import asyncio, atexit\n"
        "def late():\n"
        "    loop = asyncio.new_event_loop()\n"
        "    calls = lambda: double(1), lambda: loop.run_until_complete(double.acall(1))\n"
        "    for call in (*calls, lambda: known.run_until_complete(double.acall(1))):\n"
        "        try:\n"
        "            call()\n"
        "        except Exception as error:\n"
        "            print(error)\n"
        "    double.shutdown()\n"
        "    print(loop.run_until_complete(on_loop(4)))\n"
        "    loop.close(), known.close()\n"
        "atexit.register(late)\n"
        "from fast_batcher import aio, dynamically\n"
        "@dynamically\n"
        "def double(items):\n"
        "    return [2 * item for item in items]\n"
        "@aio.dynamically\n"
        "async def on_loop(items):\n"
        "    return items\n"
        "known = asyncio.new_event_loop()\n"
        "print(double(1), known.run_until_complete(double.acall(2)))\n"
        "atexit.register(lambda: print(double(3)))\n"
    )
    lines = done.stdout.splitlines()
    assert lines[:4] == ["2 4", "6", *["double: the interpreter is ending"] * 2]
    assert lines[4:] == ["double was shut down and takes no calls", "4"]
    assert (done.returncode, done.stderr) == (0, "")
