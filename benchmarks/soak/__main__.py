"""Run `python -m benchmarks.soak`, which shares helpers with the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from benchmarks.soak.command import main

sys.exit(main())
