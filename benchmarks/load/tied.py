"""Runs a module like `python -m`, in a process that ends with the one that started it.

A server that outlives its load test would slow every measurement after it, so the kernel sends it
SIGTERM however the load test ends. Linux only. The signal comes when the *thread* that started the
process ends, so start it from a thread that lives as long.
"""

import ctypes
import os
import runpy
import signal
import sys

# Source: prctl(2), <linux/prctl.h>.
PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Make the command that starts this process with an interpreter."""
    return [python, "-m", "benchmarks.load.tied", str(os.getpid()), module, *arguments]


def main() -> None:
    """Run the module in the second argument until the process in the first argument ends."""
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
