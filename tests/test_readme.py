"""What the README shows is Python, is formatted as our own, and begins with the quickstart."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# No process of these tests takes longer, in seconds, unless it hangs.
LIMIT = 60.0

# A fenced block: its language and its text. The fence may be indented inside a list.
BLOCK = re.compile(r"^([ ]*)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of this language, without the indentation of their fence."""
    found = []
    for indentation, name, body in BLOCK.findall(text):
        if name == language:
            found.append(re.sub(f"^{indentation}", "", body, flags=re.MULTILINE))
    return found


PROGRAMS = blocks(README, "python")
# Modules of ours that a block imports from must have what it imports.
OURS = "fast_batcher"


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\nb\n  ```python\n  y = 2\n  ```\n```sh\nls\n```\n"
    assert blocks(text, "python") == ["x = 1\n", "y = 2\n"]
    assert blocks(text, "sh") == ["ls\n"]


def test_the_readme_shows_programs() -> None:
    assert PROGRAMS


def test_no_fence_is_left_open() -> None:
    assert sum(line.lstrip().startswith("```") for line in README.splitlines()) == 2 * len(
        BLOCK.findall(README)
    )


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_every_program_compiles(number: int) -> None:
    # A line of a handler may stand alone: `await` at the top level is allowed.
    compile(
        PROGRAMS[number],
        f"README.md, program {number + 1}",
        "exec",
        flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
    )


def test_the_first_program_is_the_quickstart() -> None:
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert PROGRAMS[0] == quickstart


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_what_a_program_imports_of_ours_is_there(number: int) -> None:
    imports = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(PROGRAMS[number]))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == OURS)
        or (isinstance(node, ast.Import) and node.names[0].name.split(".")[0] == OURS)
    ]
    for statement in imports:
        exec(statement, {})


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_every_program_is_formatted_as_ours_are(number: int) -> None:
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--diff", "--stdin-filename", "readme.py", "-"],
        input=PROGRAMS[number],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"\]\((tests/[^)]+)\)`::(\w+)`", README)
    assert len(named) > 5
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (path, test)


def test_every_file_that_is_linked_is_there() -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", README)
    inside = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in inside if not (ROOT / link).exists()] == []
