"""Tests of an app by the test kit, as a user writes them: no process, and the same with processes.

`--batcher-workers=processes` runs them against real workers: see test_test_kit.py.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient
from kit_app import Shouter, app, cache, counter, shouter

from fast_batcher import QueueFullError, WorkerLostError
from fast_batcher.testing import BatcherKit


@pytest.fixture
def client(batcher_kit: BatcherKit) -> Iterator[TestClient]:
    cache.clear()
    with TestClient(app) as client:
        yield client


def get_all(client: TestClient, paths: list[str]) -> list[Any]:
    with ThreadPoolExecutor(len(paths)) as pool:
        return [answer.json() for answer in pool.map(client.get, paths)]


def test_a_request_is_answered(client: TestClient) -> None:
    assert client.get("/shout?text=hello").json() == "HELLO"


def test_a_request_is_a_batch(client: TestClient, batcher_kit: BatcherKit) -> None:
    client.get("/shout?text=hello")
    (batch,) = batcher_kit.batches
    assert (batch.batcher, batch.method, batch.inputs) == ("shouter", "infer", ["hello"])


def test_requests_share_a_batch(client: TestClient, batcher_kit: BatcherKit) -> None:
    with batcher_kit.hold(until=3):
        answers = get_all(client, ["/shout?text=a", "/shout?text=b", "/shout?text=c"])
    assert answers == ["A", "B", "C"]
    assert batcher_kit.sizes == [3]


def test_many_texts_of_one_request(client: TestClient, batcher_kit: BatcherKit) -> None:
    assert client.get("/shout-all?texts=a,b,c").json() == ["A", "B", "C"]
    assert batcher_kit.sizes == [3]


def test_a_full_batch_leaves(client: TestClient, batcher_kit: BatcherKit) -> None:
    texts = "abcdefghij"
    with batcher_kit.hold(until=2):
        assert client.get(f"/shout-all?texts={','.join(texts)}").json() == [*texts.upper()]
    assert [batch.reason for batch in batcher_kit.batches] == ["full", "hold"]


def test_a_method_has_batches_of_its_own(client: TestClient, batcher_kit: BatcherKit) -> None:
    assert client.get("/whisper?text=HELLO").json() == "hello"
    assert [batch.method for batch in batcher_kit.batches] == ["whisper"]


def test_an_endpoint_in_a_thread(client: TestClient) -> None:
    assert client.get("/shout-in-thread?text=hello").json() == "HELLO"


def test_two_batchers_of_one_request(client: TestClient, batcher_kit: BatcherKit) -> None:
    assert client.get("/both?text=abc").json() == ["ABC", 3]
    assert {batch.batcher for batch in batcher_kit.batches} == {"shouter", "counter"}


def test_a_cached_answer_needs_no_batch(client: TestClient, batcher_kit: BatcherKit) -> None:
    first, second = (client.get("/count?text=cached").json() for _ in range(2))
    assert (first, second) == (6, 6)
    assert batcher_kit.sizes == [1]


def test_an_error_of_the_model_is_500(client: TestClient) -> None:
    answer = client.get("/shout?text=")
    assert answer.status_code == 500


def test_a_full_queue_is_503(client: TestClient, batcher_kit: BatcherKit) -> None:
    batcher_kit.fail_next(QueueFullError("full", retry_after=2))
    answer = client.get("/shout?text=a")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert client.get("/shout?text=a").json() == "A"


def test_fail_next_affects_only_the_named_batcher(
    client: TestClient, batcher_kit: BatcherKit
) -> None:
    batcher_kit.fail_next(WorkerLostError, count=2, batcher="counter")
    assert client.get("/shout?text=a").status_code == 200
    assert [client.get("/count?text=new").status_code for _ in range(3)] == [503, 503, 200]


def test_app_is_ready_while_open(client: TestClient) -> None:
    assert client.get("/readyz").status_code == 200
    assert shouter.state == counter.state == "open"


def test_app_is_closed_between_tests() -> None:
    assert shouter.state in ("closed", "new")
    assert not [one for one in threading.enumerate() if "shouter" in one.name]


def test_workers_are_where_they_should_be(client: TestClient, pytestconfig: pytest.Config) -> None:
    children = [one for one in psutil.Process().children() if "spawn_main" in str(one.cmdline())]
    assert len(children) == (2 if pytestconfig.getoption("--batcher-workers") == "processes" else 0)


def test_kit_statistics_are_the_batchers(client: TestClient) -> None:
    before = shouter.stats.completed
    client.get("/shout-all?texts=a,b")
    assert shouter.stats.completed == before + 2


def test_the_model_can_be_patched(
    client: TestClient, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shouter, "infer", lambda self, inputs: ["patched"] * len(inputs))
    is_here = pytestconfig.getoption("--batcher-workers") == "threads"
    assert client.get("/shout?text=a").json() == ("patched" if is_here else "A")
