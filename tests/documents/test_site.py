"""The site of the documentation builds, its links lead somewhere, and it loads nothing else."""

import os
import re
import sys
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from inspect import isclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from browsers import browser
from paths import ROOT
from programs import run_command

import fast_batcher
from benchmarks.batch_pictures import draw_all
from benchmarks.limit_picture import PICTURE, draw_limits

__all__ = ["browser"]

pytest.importorskip("mkdocs")

# Elements that a browser loads by itself, and the attribute with the address.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@dataclass
class Html(HTMLParser):
    """The links of a page, the addresses that it loads, and its anchors."""

    page: Path
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and (link := found.get("href")) is not None:
            self.links.append(link)
        if tag in LOADED and found.get("rel") != "canonical" and (link := found.get(LOADED[tag])):
            self.loaded.append(link)


class Site:
    """A built site: its pages by path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def pages(self) -> dict[Path, Html]:
        return {path: Html(path) for path in sorted(self.folder.rglob("*.html"))}

    def find(self, page: Path, address: str) -> Path:
        """The file that an address in a page means."""
        path = unquote(urlsplit(address).path)
        if not path:
            return page
        target = self.folder / path[1:] if path.startswith("/") else page.parent / path
        return Path(os.path.normpath(target / "index.html" if target.is_dir() else target))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    done = run_command(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Site(folder)


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Site) -> None:
    broken = []
    for path, html in site.pages.items():
        for link in html.links:
            if urlsplit(link).scheme:
                continue
            target, anchor = site.find(path, link), unquote(urlsplit(link).fragment)
            known = site.pages[target].anchors if target in site.pages else {""}
            if not target.exists() or (anchor and anchor not in known):
                broken.append((str(path.relative_to(site.folder)), link))
    assert broken == []
    assert len(site.pages) > 50


@pytest.mark.slow
def test_every_link_to_the_source_names_a_file(site: Site) -> None:
    (repository,) = re.findall(r"^repo_url: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    form = re.compile(rf"{re.escape(repository)}/(blob|tree)/main/([^#]+)")
    links = {link for html in site.pages.values() for link in html.links if form.match(link)}
    assert len(links) > 50
    for link in links:
        found = form.match(link)
        assert found is not None
        target = ROOT / found[2]
        assert target.is_dir() if found[1] == "tree" else target.is_file(), link


@pytest.mark.slow
def test_nothing_is_loaded_from_another_server(site: Site) -> None:
    for path, html in site.pages.items():
        for link in html.loaded:
            assert not urlsplit(link).netloc, (path, link)
            assert site.find(path, link).exists(), (path, link)
        # The theme's own link to the repository asks the server of the repository for numbers.
        assert 'data-md-component="source"' not in path.read_text()
    for style in site.folder.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style


@pytest.mark.slow
def test_the_site_shows_every_public_class(site: Site) -> None:
    anchors = {anchor for html in site.pages.values() for anchor in html.anchors}
    kinds = {name for name in fast_batcher.__all__ if isclass(getattr(fast_batcher, name))}
    kinds -= {"DynamicBatchIndexError"}  # another name for a class
    shown = {f"fast_batcher.{name}" for name in kinds} & anchors
    shown |= {f"fast_batcher.errors.{name}" for name in kinds} & anchors
    assert {name.rpartition(".")[2] for name in shown} == kinds


@pytest.mark.slow
def test_meaning_of_each_setting_is_visible_on_a_phone(site: Site, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((site.folder / "settings" / "index.html").as_uri())
    page.locator(".md-typeset__scrollwrap").first.wait_for()  # the theme has wrapped the tables
    edges = page.evaluate(
        "[...document.querySelectorAll('td:nth-child(4)')]"
        ".map(cell => cell.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    page.close()
    assert len(edges) > 40
    assert all(0 <= left < right <= 390 for left, right in edges)


def test_the_index_lists_every_decision() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    listed = re.findall(r"^(\d+)\. \[(.*)\]\((.*)\)$", index, re.MULTILINE)
    notes = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    titles = [note.read_text().partition("\n")[0] for note in notes]
    assert [name for _, _, name in listed] == [note.name for note in notes]
    assert [f"# {number}. {title}" for number, title, _ in listed] == titles


def test_drawings_match_the_scheduler() -> None:
    """If it fails: look at what `python -m benchmarks.batch_pictures` draws now."""
    for name, drawing in draw_all().items():
        assert (ROOT / "docs" / "images" / name).read_text() == drawing, name


def test_drawing_of_time_limits_is_current() -> None:
    """If it fails: run `python -m benchmarks.limit_picture`."""
    assert PICTURE.read_text() == draw_limits()
