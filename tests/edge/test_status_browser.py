"""The status page in a real browser: Debian's Chromium, driven by Playwright."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browsers import browser
from servers import Server, get, post, serve
from shared_hosts import Hosts, hosts
from waits import LIMIT, measured

__all__ = ["browser", "hosts", "serve"]

# A folder for screenshots to look at.
SCREENSHOTS = os.environ.get("SCREENSHOTS", "")
pytestmark = pytest.mark.slow


class Page:
    """An open status page, with all that it has asked for and complained about."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.view = browser.new_page(**options)
        self.view.set_default_timeout(1000 * LIMIT)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.view.on("request", lambda request: self.requests.append(request.url))
        self.view.on("console", lambda message: self.complaints.append(message.text))
        self.view.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.view.goto(f"{url}/inside/batchers")
        self.wait_for("#link", "Live")

    def wait_for(self, selector: str, text: str) -> None:
        self.view.locator(selector).filter(has_text=text).first.wait_for()

    def has_focus(self, text: str) -> bool:
        return bool(self.view.evaluate("document.activeElement.textContent") == text)

    def measure(self, expression: str) -> Any:
        return self.view.evaluate(expression)


@pytest.fixture
def server(serve: Callable[..., Server]) -> tuple[Server, str]:
    # As behind a proxy that removes a part of the path.
    options = ("--root-path", "/proxy", "--no-access-log")
    server = serve("status_app:app", *options, folder=Path(__file__).parent)
    return server, server.url()


def call(url: str, path: str) -> None:
    post(f"{url}/call/{path}")


def test_page_updates_figures_and_shows_killed_worker(
    server: tuple[Server, str], browser: Any
) -> None:
    url = server[1]
    page = Page(browser, url)
    page.wait_for(".verdict", "All is well")
    assert page.view.locator("section.batcher h2").all_inner_texts() == [
        *("first", "second", "third", "Error answers")
    ]
    for count in (300, 1000):
        call(url, f"second/fine?count={count}")
        page.wait_for("#batcher-1", f"{300 if count == 300 else 1300:,} answered")
    call(url, "third/raise")
    page.wait_for(".verdict .warning", "1 request failed within a minute")
    page.wait_for("table", "ValueError")

    data = get(f"{url}/inside/batchers.json").json()
    os.kill(data["batchers"][0]["workers"][1]["pid"], signal.SIGKILL)
    with measured(2.0, "from a worker's death to the status page"):
        page.wait_for(".verdict", "signal 9 (SIGKILL")
    assert page.view.title().startswith("(")
    page.wait_for("#batcher-0 table", "signal 9 (SIGKILL")

    assert all(one.startswith(url) for one in page.requests), page.requests
    assert page.complaints == []


@pytest.fixture
def shared_servers(hosts: Hosts, serve: Callable[..., Server]) -> Iterator[list[str]]:
    """Two servers of one host, the first of which reports."""
    servers, urls = list[Server](), list[str]()
    for _ in "12":  # one after the other
        servers.append(serve("shared_status_app:app", folder=Path(__file__).parent))
        urls.append(servers[-1].url())
    yield urls
    # The host, which has the output of the first, ends with the last.
    for one in servers:
        one.process.terminate()
    for one in servers:
        one.process.wait(LIMIT)


@pytest.mark.parametrize("width", [1280, 375])
def test_follower_marks_unknown_figures(
    shared_servers: list[str], browser: Any, width: int
) -> None:
    urls = shared_servers
    page = Page(browser, urls[1], viewport={"width": width, "height": 900})
    page.wait_for(".verdict", "All is well")
    for value in ["fine"] * 20 + ["raise"] * 10 + ["die"]:
        post(f"{urls[0]}/call/{value}")
    page.wait_for(".verdict .critical", "11 requests failed within a minute")
    page.wait_for(".verdict .warning", "lost once in five minutes; which and why is not known here")
    page.wait_for("#batcher-0", "Another server process reports")
    page.wait_for("#batcher-0 table", "not known here")
    assert page.view.title().startswith("(2) Critical")
    for _ in "123":
        post(f"{urls[1]}/call/raise")
    page.wait_for("tr:has-text('ValueError')", "3")
    assert page.measure("document.documentElement.scrollWidth") == width
    assert page.complaints == []
    if SCREENSHOTS:
        image = page.view.screenshot(full_page=True)
        Path(SCREENSHOTS, f"follower_{width}.png").write_bytes(image)
    page.view.close()


@pytest.mark.parametrize("width", [1280, 375])
def test_page_speaks_of_streams(serve: Callable[..., Server], browser: Any, width: int) -> None:
    url = serve("stream_status_app:app", folder=Path(__file__).parent).url()
    page = Page(browser, url, viewport={"width": width, "height": 900})
    page.wait_for("#batcher-0 .figures", "0of 4 places")
    call(url, "20?count=30")
    with httpx2.stream("GET", f"{url}/stream/1000000000") as left:
        assert left.status_code == 200
        page.wait_for("#batcher-0 .figures", "1of 4 places")
        page.wait_for("#batcher-0", "30 answered")
        page.wait_for("#batcher-0 .explanation", "of the 4 places of a worker")
        text = page.view.locator("#batcher-0").inner_text()
        assert page.measure("document.documentElement.scrollWidth") == width
        if SCREENSHOTS:
            image = page.view.screenshot(full_page=True)
            Path(SCREENSHOTS, f"streams_{width}.png").write_bytes(image)
    figures = page.view.locator("#batcher-0 .figures dt").all_inner_texts()
    assert figures[4:] == ["First chunk p50", "First chunk p95", "Chunk gap p95", "Chunks/s"]
    assert re.search("batch(?!_)", text.replace("Batchers", ""), re.IGNORECASE) is None
    page.wait_for("#batcher-0 .figures", "0of 4 places")
    assert "Batch sizes" in page.view.locator("#batcher-1").inner_text()
    assert page.complaints == []
    page.view.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_is_readable_in_themes_and_on_phones(
    server: tuple[Server, str], browser: Any, theme: str
) -> None:
    url = server[1]
    call(url, "first/fine?count=100")
    call(url, "second/raise")
    page = Page(browser, url, color_scheme=theme, viewport={"width": 375, "height": 812})
    page.wait_for(".verdict", "1 request failed")
    assert page.measure("document.documentElement.scrollWidth") == 375
    assert page.measure("getComputedStyle(document.body).backgroundColor") == (
        "rgb(246, 247, 249)" if theme == "light" else "rgb(17, 20, 24)"
    )
    poor = {text: ratio for text, ratio in page.measure(CONTRASTS).items() if ratio < 4.5}
    assert poor == {}
    assert page.complaints == []


# The contrast of each text with what is behind it, as WCAG 2.1 defines it.
CONTRASTS = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => numbers(color).slice(0, 3)
    .map((one) => one / 255)
    .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return numbers(color)[3] === 0 && node.parentElement ? ground(node.parentElement) : color;
  };
  const found = {};
  for (const node of document.body.querySelectorAll("*:not(script, noscript, svg, svg *)")) {
    if (![...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim())) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    found[node.textContent] = (a + 0.05) / (b + 0.05);
  }
  return found;
}"""


def test_the_keyboard_reaches_all_that_can_be_used(
    server: tuple[Server, str], browser: Any
) -> None:
    page = Page(browser, server[1])
    page.wait_for(".verdict", "All is well")
    reached = []
    for _ in range(5):
        page.view.keyboard.press("Tab")
        reached.append(page.measure("document.activeElement.textContent"))
    assert reached == ["Skip to the figures", "Pause", "first", "second", "third"]
    page.view.keyboard.press("Enter")
    page.wait_for("#batcher-2:target", "third")
    for _ in "1234":
        page.view.keyboard.press("Shift+Tab")
        if page.has_focus("Pause"):
            break
    page.view.keyboard.press("Space")
    page.wait_for("#link", "Paused")
    assert page.has_focus("Go on")
    call(server[1], "first/fine?count=77")
    page.view.keyboard.press("Space")
    page.wait_for("#batcher-0", "77 answered")


def test_page_marks_stale_figures_and_reconnects(
    server: tuple[Server, str], serve: Callable[..., Server], browser: Any
) -> None:
    process, url = server
    page = Page(browser, url)
    process.process.terminate()
    process.wait_for_exit()
    page.wait_for("#link", "figures are old")
    assert page.measure("document.body.classList.contains('stale')")
    port = url.rpartition(":")[2]
    serve("status_app:app", "--port", port, folder=Path(__file__).parent).url()
    page.wait_for("#link", "Live")
    assert not page.measure("document.body.classList.contains('stale')")
