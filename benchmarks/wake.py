"""What it takes to wake another process, by a write into its pipe. Runs in the measured process.

A process that waits lets its core go to sleep, and to wake that is a call to the kernel, and on a
virtual machine to the hypervisor, so it differs from machine to machine and from hour to hour.
Whoever hands work to another process pays it once per batch, so it stands beside figures.
"""

import statistics
import subprocess
import sys
import time

# One write each; a fifth of a second altogether.
WRITES = 100
# Between writes, seconds: long enough for the other side to wait again.
PAUSE = 0.002


def wake_us() -> float:
    """Microseconds of CPU that the writer spends, the median."""
    code = "import os\nwhile os.read(0, 1): pass"
    used = []
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin is not None
        for _ in range(WRITES):
            time.sleep(PAUSE)
            before = time.thread_time()
            child.stdin.write(b"x")
            used.append(time.thread_time() - before)
    # The first ones find a child that is not there yet.
    return 1e6 * statistics.median(used)
