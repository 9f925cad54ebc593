"""The benchmark of one GPU: its short form on the CPU, and parts that fail."""

import json
import sys
from pathlib import Path

import pytest
from paths import ROOT
from programs import run_command

from benchmarks.gpu.__main__ import LIMITS, read_arguments, run_part
from benchmarks.gpu.report import Results

# The tables of parts that have others than their own.
TABLES = {"http": {"resnet", "encoder"}}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [("times",), pytest.param(tuple(LIMITS), marks=pytest.mark.long)])
def test_the_short_form_measures_every_part_and_loses_nothing(
    parts: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    done = run_command([*command, "--parts", *parts, "--out", str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    measurements = result["measurements"]
    assert result["failures"] == []
    tables = set().union(*[TABLES.get(part, {part}) for part in parts])
    assert {m["scenario"] for m in measurements} == tables
    assert all(m["figures"] for m in measurements)
    assert sum(m["figures"].get("lost", 0) for m in measurements) == 0
    faults = {m["system"]: m["figures"] for m in measurements if m["scenario"] == "faults"}
    ended = {name: (f["failed"], f["restarts"]) for name, f in faults.items()}
    right = {"out of memory": (0, 0), "worker killed": (1, 2)} if "faults" in parts else {}
    assert ended == right
    assert done.stdout.strip() == (tmp_path / "gpu.txt").read_text().strip()
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "limit", "reason"),
    [("times", 0.0, "no end after 0 s"), ("absent", 100.0, "No module named")],
)
def test_a_failed_part_has_a_reason(part: str, limit: float, reason: str, tmp_path: Path) -> None:
    options = read_arguments(["--device", "cpu", "--quick"])
    failure = run_part(part, options, limit, tmp_path / "rows")
    assert failure is not None
    assert reason in failure


def test_rows_of_a_failed_part_are_kept(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    row = {"table": "times", "system": "n = 1", "repetition": 0, "figures": {"eager": 2.5}}
    lines = [{"table": "times", "title": "Times"}, row, {"note": "noted"}]
    rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    results = Results("cpu")
    results.read(rows)
    results.add_failure("times", "no end after 5 s")
    text = results.text()
    assert "n = 1     2.5" in text
    assert text.endswith("noted")
    assert [m.error for m in results.measurements] == [None, "no end after 5 s"]
