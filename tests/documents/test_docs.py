"""The programs in the documents print what stands below them; links and faults exist."""

import csv
import re
import sys
from pathlib import Path

import pytest
from paths import ROOT
from programs import run_command

from benchmarks.setup_peers import PEERS

# A program, and what it prints.
BLOCK = r"((?:(?!```).*\n)*)```"
PROGRAM = re.compile(rf"^```python\n{BLOCK}\n\n```text\n{BLOCK}$", re.MULTILINE)
PAGES = sorted((ROOT / "docs").glob("*.md"))
PROGRAMS = [
    pytest.param(code, printed, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (code, printed) in enumerate(PROGRAM.findall(page.read_text()), 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "printed"), PROGRAMS)
def test_programs_print_the_shown_output(code: str, printed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)
    done = run_command(
        [sys.executable, "-W", "error", str(program)], env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


# --- what the documents name ----------------------------------------------------------------------

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "tests" / "faults" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    ROOT / "benchmarks" / "README.md",
]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
FAULT = re.compile(r"\bF\d\d\b")


def anchors(document: str) -> set[str]:
    """The headings of a document as GitHub writes them in links."""
    titles = re.findall(r"^#+ (.*)$", document, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    for link, anchor in LINK.findall(document.read_text()):
        if "://" in link:
            continue
        target = document.parent / link if link else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), (link, anchor)


def test_the_readme_links_every_example() -> None:
    """The site has every page: it does not build if its navigation leaves one out."""
    linked = {link for link, _ in LINK.findall((ROOT / "README.md").read_text())}
    examples = (ROOT / "examples").glob("*/README.md")
    assert {path.relative_to(ROOT).as_posix() for path in examples} - linked == set()


def test_every_test_that_guarantees_name_exists() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"\]\(\.\./(tests/[^)]+)\)`::(\w+)`", page)
    assert len(named) > 5
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (path, test)


def test_the_comparison_shows_twenty_rows_of_its_file() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text().split("\n## ")[1]
    with (ROOT / "docs" / "comparison.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    shown = [row[2:-2].split(" | ") for row in re.findall(r"^\| .*$", page, re.MULTILINE)[2:]]
    assert len(shown) == 20
    assert all(
        [cell.replace("\\*", "*") for cell in row] in [one[1:] for one in rows] for row in shown
    )
    assert f"All {len(rows)} abilities" in (ROOT / "docs" / "comparison.md").read_text()


def test_each_ability_of_the_comparison_links_to_its_page_or_test() -> None:
    with (ROOT / "docs" / "comparison.csv").open(newline="") as file:
        for _, _, ours, *_ in csv.reader(file):
            links = LINK.findall(ours)
            assert links or ours in {"fast_batcher", "no", "best effort"}
            for link, anchor in links:
                target = ROOT / "docs" / link
                assert target.exists(), link
                assert not anchor or anchor in anchors(target.read_text()), (link, anchor)


def test_comparison_names_the_pinned_versions() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    for peer in ("fast_dynamic_batcher", "batched", "bentoml", "litserve", "mosec", "ray_serve"):
        assert f" {PEERS[peer][0].partition('==')[2]}" in " ".join(page.split()), peer


def test_every_fault_has_a_test() -> None:
    page = (ROOT / "tests" / "faults" / "README.md").read_text()
    listed = {row[2:5] for row in page.splitlines() if FAULT.match(row[2:5])}
    named = {
        fault
        for path in (ROOT / "tests").rglob("test_*.py")
        for line in re.findall(r'^ *"""Faults? (.*)$', path.read_text(), re.MULTILINE)
        for fault in FAULT.findall(line)
    }
    assert len(listed) > 50
    assert listed == named
