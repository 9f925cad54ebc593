"""The short form of every soak, and the arithmetic of its bars."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from marks import long
from paths import ROOT
from programs import run_command

from benchmarks.soak.report import Findings, make_table
from benchmarks.soak.scenarios import SCENARIOS

# The longest of them.
LONG = ("S6", "S10")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", [*[name for name in SCENARIOS if name not in LONG], *long(*LONG)]
)
def test_the_short_form(scenario: str, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", scenario, "--short", "--json", str(path)]
    # What other tests put into the common directory is not this program's. Paths of sockets have to
    # be short.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as temporary:
        done = run_command(command, cwd=ROOT, env={**os.environ, "TMPDIR": temporary})
    assert path.exists(), done.stdout + done.stderr
    ((rows,),) = [[one["rows"] for one in json.loads(path.read_text())["scenarios"]]]
    # How late the loop is depends on what else the machine does; `make soak` judges that.
    missed = [row for row in rows if row["holds"] is False and "lag" not in row["what"]]
    assert not missed, done.stdout


def test_a_missed_bar_is_seen() -> None:
    findings = Findings("S0")
    findings.none("nothing wrong", 0)
    findings.tell("told", 1.23456)
    before = findings.holds
    findings.none("something wrong", 2)
    assert (before, findings.holds) == (True, False)
    table = make_table([findings])
    assert "MISSED" in table
    assert "1.23" in table
