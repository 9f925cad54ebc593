"""Lets `python -m tests.soak` find the modules here by the names that the tests use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from soak.command import main

sys.exit(main())
