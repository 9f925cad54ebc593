"""The programs in the documents run, print what stands below them, and are formatted as ours."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# No program takes longer, in seconds, unless it hangs; one loads PyTorch in two processes.
LIMIT = 100.0

# A program, and what it prints.
PROGRAM = re.compile(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted((ROOT / "docs").glob("*.md"))
PROGRAMS = [
    pytest.param(code, printed, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (code, printed) in enumerate(PROGRAM.findall(page.read_text()), 1)
]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(("code", "printed"), PROGRAMS)
def test_a_program_prints_what_the_page_says(code: str, printed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.parametrize(("code", "printed"), PROGRAMS)
def test_a_program_is_formatted_as_ours_are(code: str, printed: str) -> None:
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--diff", "--stdin-filename", "page.py", "-"],
        input=code,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
