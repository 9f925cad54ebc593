"""Folders of the repository, for tests that start programs in them or read files of theirs."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent

# In the environment of a program: it finds the library and what the tests share.
PYTHONPATH = f"{SUPPORT}{os.pathsep}{ROOT}"
