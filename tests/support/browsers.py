"""A real browser for tests of pages: Debian's Chromium, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, started outside of single tests: threads of its driver outlive it by a moment."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright's package is needed")
    if (path := shutil.which("chromium")) is None:
        pytest.skip("Chromium is needed: apt-get install chromium")
    options = ["--no-sandbox"] if os.getuid() == 0 else []  # root may start no sandbox
    with (
        sync_api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=options) as chromium,
    ):
        yield chromium
