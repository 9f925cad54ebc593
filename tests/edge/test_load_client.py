"""The client of `fast-batcher bench`: it counts what servers answer, whatever they are."""

import json
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
from paths import SUPPORT
from programs import run_command
from servers import Server, find_free_port, serve, wait_until_listening

from fast_batcher._load import client
from fast_batcher._load.client import Record, Target
from fast_batcher._load.measurement import Case, LoadSettings, make_plans, run_clients

__all__ = ["serve"]

pytestmark = pytest.mark.slow

APP = "apps.tallied:app"
# Nobody reads its log.
UVICORN = ["uvicorn", APP, "--no-access-log"]
SETTINGS = LoadSettings(
    bodies=[b""],
    content_type="",
    seconds=0.4,
    warm_up=0.1,
    late=30.0,
    client_processes=1,
    seed=1,
    method="GET",
)


def load(target: Target, path: str = "/", rate: float | None = None) -> Record:
    """Put a server under a load, and check that the client has counted what the server has."""
    before = count(target)
    (plan,) = make_plans(target, Case("", path, 4, rate), 0, SETTINGS)
    (record,) = run_clients([plan])
    assert record.answers + sum(record.lost.values()) == count(target) - before
    return record


def count(target: Target) -> int:
    status, body = target.ask("GET", "/count")
    assert status == 200
    return int(json.loads(body))


def target_of(url: str) -> Target:
    parts = urlsplit(url)
    return Target(parts.hostname or "", parts.port or 0)


@pytest.fixture(params=["uvicorn", "gunicorn", "hypercorn", "granian"])
def target(request: pytest.FixtureRequest, serve: Callable[..., Server], tmp_path: Path) -> Target:
    port = find_free_port()
    address = f"127.0.0.1:{port}"
    # A connection of hypercorn ends after 50 requests.
    config = tmp_path / "config.toml"
    config.write_text("keep_alive_max_requests = 50\n")
    commands = {
        "uvicorn": [*UVICORN, "--port", str(port)],
        "gunicorn": ["gunicorn", APP, "-b", address, "-k", "uvicorn_worker.UvicornWorker"],
        "hypercorn": ["hypercorn", APP, "-b", address, "-c", str(config)],
        "granian": ["granian", APP, "--interface", "asgi", "--port", str(port)],
    }
    serve("", command=commands[request.param])
    wait_until_listening(f"http://{address}")
    return target_of(f"http://{address}")


@pytest.mark.parametrize("rate", [None, 200.0], ids=["closed", "open"])
def test_each_answer_of_a_server_is_counted(target: Target, rate: float | None) -> None:
    record = load(target, rate=rate)
    assert record.lost == {}
    assert record.answers > 50


@pytest.fixture(scope="module")
def odd() -> Iterator[Target]:
    server = Server("", command=[str(SUPPORT / "odd_server.py")])
    yield target_of(server.url())
    server.close()


@pytest.mark.parametrize("rate", [None, 200.0], ids=["closed", "open"])
@pytest.mark.parametrize(
    "path", ["/close", "/old", "/without-length", "/trailers", "/zero", "/early"]
)
def test_answers_that_few_servers_send_are_good(odd: Target, path: str, rate: float | None) -> None:
    record = load(odd, path, rate)
    assert (record.lost, record.answers > 0) == ({}, True)


@pytest.mark.parametrize(
    ("path", "outcome"),
    [("/cut", "connection closed"), ("/nonsense", "an answer that is not HTTP")],
)
def test_answers_that_are_broken_are_lost(odd: Target, path: str, outcome: str) -> None:
    record = load(odd, path)
    (lost,) = record.lost
    assert lost.startswith(outcome)
    assert record.answers == 0
    with pytest.raises(ConnectionError, match=outcome):
        odd.ask("GET", path)


def test_a_unix_socket_and_tls_are_reached(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    trusted, key, chain = (tmp_path / name for name in ("trusted", "key", "chain"))
    authority.cert_pem.write_to_path(str(trusted))
    certificate.private_key_pem.write_to_path(str(key))
    certificate.cert_chain_pems[0].write_to_path(str(chain))
    tls = ["--ssl-keyfile", str(key), "--ssl-certfile", str(chain)]
    path = str(tmp_path / "socket")
    server = serve("", command=[*UVICORN, "--uds", path])
    server.wait_for("running on")
    plain = Target("any.example", 80, socket_path=path)
    assert load(plain).lost == {}

    server = serve("", command=[*UVICORN, "--port", "0", *tls])
    port = int(server.wait_for(r"running on https://127.0.0.1:(\d+)")[1])
    encrypted = Target("localhost", port, is_encrypted=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        count(encrypted)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    client.make_context.cache_clear()
    assert load(encrypted).lost == {}


def test_headers_of_the_user_replace_those_of_the_client() -> None:
    given = (
        ("host", "model.example"),
        ("Content-Type", "text/plain"),
        ("X-Two", "1"),
        ("X-Two", "2"),
    )
    target = replace(Target("127.0.0.1", 80), headers=given)
    head, _, body = target.make_request("POST", "/", b"text", "application/json").partition(
        b"\r\n\r\n"
    )
    assert head.decode().split("\r\n") == [
        *["POST / HTTP/1.1", "Content-Length: 4", "host: model.example"],
        *["Content-Type: text/plain", "X-Two: 1", "X-Two: 2"],
    ]
    assert body == b"text"


def test_the_client_imports_nothing_of_the_library() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print('fast_batcher' in sys.modules)"
    done = run_command([sys.executable, "-P", "-c", code, client.__file__])
    assert done.stdout == "False\n", done.stderr
