"""Programs of their own, for what happens when an interpreter ends."""

import os
import subprocess
import sys

from waits import LIMIT

# What comes after the definition of `double`, a function that batches: a call of it by an object
# that goes with the program.
CALL_WHILE_ENDING = """
class Late:
    def __del__(self, double=double, print=print):
        try:
            double(1)
        except Exception as error:
            print(error)
late = Late()
"""


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with the modules that this process finds."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
