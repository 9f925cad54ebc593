"""The example of streams: its endpoints behind a real server, and what its model writes."""

import json
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import httpx2
import pytest
from browsers import browser
from paths import ROOT
from programs import run_command
from servers import run_server
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from torch_threads import threads_as_before
from waits import LIMIT

from examples.streams.app import app
from examples.streams.decoder import CHARACTERS, Decoder, Prompt

__all__ = ["browser", "threads_as_before"]

pytestmark = pytest.mark.slow

ASKED: dict[str, str | int] = {"text": "Once upon a time", "length": 30, "seed": 7}


@pytest.fixture(scope="module")
def written() -> str:
    """What the model writes alone."""
    (characters,) = Decoder().infer([Prompt("Once upon a time", 30, 7)])
    assert not isinstance(characters, Exception)
    return "".join(characters)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with run_server("examples.streams.app:app", ROOT) as address:
        yield address


def test_a_text_does_not_depend_on_the_streams_beside_it(written: str) -> None:
    decoder = Decoder()
    others = [Prompt("x", 5, 1), Prompt("A longer one" * 10, 60, 2)]
    beside = decoder.infer([others[0], Prompt("Once upon a time", 30, 7), others[1]])
    assert beside[1] == list(written)
    assert set(written) <= set(CHARACTERS)
    assert len(set(written)) > 5


def test_characters_are_sent_as_plain_text(address: str, written: str) -> None:
    answer = httpx2.get(f"{address}/text", params=ASKED, timeout=LIMIT)
    assert (answer.status_code, answer.text) == (200, written)


def test_characters_are_sent_as_events(address: str, written: str) -> None:
    answer = httpx2.get(f"{address}/events", params=ASKED, timeout=LIMIT)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    begin, *events, end, rest = answer.text.split("\n\n")
    assert "".join(json.loads(event.removeprefix("data: ")) for event in events) == written
    assert (begin, end, rest) == ("id: 0", "event: end\ndata:", "")


def test_a_browser_reads_the_events_once(address: str, written: str, browser: Any) -> None:
    """It asks again after the end, and no further time."""
    page = browser.new_page()
    page.set_default_timeout(1000 * LIMIT)
    page.goto(f"{address}/openapi.json")
    opened, read = page.evaluate(
        """path => new Promise(done => {
            let opened = 0, read = "";
            const source = new EventSource(path);
            source.onopen = () => opened++;
            source.onmessage = event => read += JSON.parse(event.data);
            source.onerror = () => source.readyState == 2 && done([opened, read]);
        })""",
        "/events?" + urlencode(ASKED),
    )
    assert (opened, read) == (1, written)
    page.close()


@pytest.mark.parametrize("wrong", [{"text": ""}, {"text": "\N{SNOWMAN}"}, {"length": 0}])
def test_a_wrong_request_is_422_before_the_model(address: str, wrong: dict[str, str | int]) -> None:
    answer = httpx2.get(f"{address}/text", params=ASKED | wrong, timeout=LIMIT)
    assert answer.status_code == 422


def test_a_websocket_answers_one_message_after_the_other(written: str) -> None:
    with TestClient(app) as client, client.websocket_connect("/chat") as socket:
        for _ in range(2):
            socket.send_json(ASKED)
            received = [*iter(socket.receive_text, "")]
            assert "".join(received) == written
        socket.send_text("no request")
        with pytest.raises(WebSocketDisconnect) as caught:
            socket.receive_text()
        assert caught.value.code == 1007


def test_the_page_writes_in_a_browser(address: str, browser: Any) -> None:
    page = browser.new_page()
    page.set_default_timeout(1000 * LIMIT)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    ready = page.locator("#state").filter(has_text="Ready")
    for text in ("Once upon a time", "<b>A & B</b>"):
        ready.wait_for()
        page.get_by_label("Text to continue").fill(text)
        page.get_by_role("button", name="Write").click()
        expected = "".join(Decoder().infer([Prompt(text, 80)])[0])  # type: ignore[arg-type]
        page.locator("#written").filter(has_text=text + expected).wait_for()
    ready.wait_for()
    assert complaints == []
    page.close()


def test_doctor_times_its_steps() -> None:
    inputs = ("--inputs", "examples.streams.decoder:PROMPTS")
    command = [sys.executable, "-m", "fast_batcher", "doctor", "examples.streams.app:batcher"]
    done = run_command([*command, *inputs, "--json"], cwd=ROOT)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert "t(32) = " in checks["steps"]["text"]
    assert checks["batch independence"]["level"] == "good"
