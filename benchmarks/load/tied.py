"""Runs a module as `python -m` does, in a process that ends with the one that started it.

A server that survives its load test would burden every measurement after it, so the kernel tells
it to end whatever became of the load test. Linux only. The signal comes when the *thread* that
started the process ends: start it from one that lives as long.
"""

import ctypes
import os
import runpy
import signal
import sys

# Source: prctl(2), <linux/prctl.h>.
PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """What to start such a process with."""
    return [sys.executable, "-m", "benchmarks.load.tied", str(os.getpid()), module, *arguments]


def main() -> None:
    """Run the module that the second argument names, for the process that the first one does."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    # SIGTERM, so that a server ends its workers in order.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("the process that started this one has ended")
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
