"""Hooks of MkDocs: pages from outside docs/, links to the source, and pictures inside the page.

The documents link to each other and to files of the repository by relative paths, which work in a
checkout. Here a link to a file that is no page of the site becomes a link to `repo_url`.
"""

import csv
import itertools
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Files outside docs/ that are pages or pictures of the site, if the repository has them.
OUTSIDE = {
    name: page
    for name, page in {
        "CHANGELOG.md": "project/changelog.md",
        "CONTRIBUTING.md": "project/contributing.md",
        "SECURITY.md": "project/security.md",
        "benchmarks/README.md": "project/benchmarks.md",
        "benchmarks/results/gpu.png": "images/gpu.png",
    }.items()
    if (ROOT / name).exists()
}
SOURCES = {page: name for name, page in OUTSIDE.items()}

# Code, which stays as it is, or a link.
LINK = re.compile(r"(?ms)^```.*?^```|`[^`\n]+`|(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
# A paragraph that is a link to a manifest, and nothing else.
MANIFEST = re.compile(r"^\[[^\]]+\]\(\.\./(deploy/[^)]+\.(\w+))\)$", re.MULTILINE)
# A paragraph that is a link to a table of values, and nothing else.
VALUES = re.compile(r"^\[[^\]]+\]\((\w+\.csv)\)$", re.MULTILINE)
# Drawings whose colours follow the palette of the page, which a picture in an <img> cannot do.
DRAWING = re.compile(r'<img alt="([^"]*)" src="[^"]*images/(drawn_\w+\.svg)" ?/?>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files from outside docs/."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the security policy to the navigation."""
    if "SECURITY.md" in OUTSIDE:
        section = next(entry["Project"] for entry in config.nav or [] if "Project" in entry)
        section.append({"Security": OUTSIDE["SECURITY.md"]})
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the manifests that a page names, and rewrite its links."""
    here = page.file.src_uri

    def rewrite(link: re.Match[str]) -> str:
        if link[1] is None:
            return link[0]
        return link[1] + _find_target(link[2], here, files, config.repo_url or "") + link[3]

    shown = VALUES.sub(_show_rows, MANIFEST.sub(_show_file, markdown))
    return LINK.sub(rewrite, shown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each drawing into the page itself."""
    return DRAWING.sub(_inline, html)


def _find_target(link: str, here: str, files: Files, repository: str) -> str:
    if "://" in link or link.startswith("mailto:"):
        return link
    source = SOURCES.get(here, f"docs/{here}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    page = OUTSIDE.get(path, path.removeprefix("docs/"))
    if (ROOT / path).is_dir():
        page += "/README.md"
    if (path in OUTSIDE or path.startswith("docs/")) and files.get_file_from_path(page):
        return posixpath.relpath(page, posixpath.dirname(here) or ".")
    return f"{repository}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"


def _show_file(link: re.Match[str]) -> str:
    language = {"yaml": "yaml", "service": "ini"}[link[2]]
    return f"{link[0]}\n\n```{language}\n{(ROOT / link[1]).read_text().rstrip()}\n```"


def _show_rows(link: re.Match[str]) -> str:
    """Show a file of values as a table for each value of its first column."""
    with (ROOT / "docs" / link[1]).open(newline="") as file:
        (_, *titles), *rows = csv.reader(file)
    parts = [link[0]]
    for section, found in itertools.groupby(rows, key=lambda row: row[0]):
        head = [titles, ["---"] * len(titles)]
        lines = [*head, *[[cell.replace("*", "\\*") for cell in row[1:]] for row in found]]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"### {section}\n\n{table}")
    return "\n\n".join(parts)


def _inline(image: re.Match[str]) -> str:
    text = (ROOT / "docs" / "images" / image[2]).read_text()
    # The palette of the page counts, and not that of the system.
    text = text.replace("@media (prefers-color-scheme: dark)", '[data-md-color-scheme="slate"]')
    return text.replace('role="img"', f'role="img" aria-label="{image[1]}"')
