"""New weights and new code while clients ask: the recipes of `docs/deployment.md`."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from marks import long
from paths import PYTHONPATH, ROOT
from server_load import UNDER_WAY, URL, Load, load
from servers import Server, get, post, serve, thread
from shared_hosts import Hosts, hosts
from waits import Gate

__all__ = ["hosts", "load", "serve", "thread"]

pytestmark = pytest.mark.slow

CODE = re.compile(r'^```python\n("""Save as `server.py`.*?)^```', re.MULTILINE | re.DOTALL)
HEADERS = {"Authorization": "Bearer secret"}

# Seconds that a model loads: more than uvicorn waits for a new process if it is not told otherwise.
SECONDS = 8

CLASSIFIER = """
import json
import time
from pathlib import Path

from fast_batcher import InferenceModel
from models.base import pass_gate


class Classifier(InferenceModel[str, str]):
    def __init__(self, weights: str) -> None:
        self._version, seconds, gate = json.loads(Path(weights).read_text())
        time.sleep(seconds)
        if gate:
            pass_gate(gate)

    def infer(self, inputs: list[str]) -> list[str]:
        return [f"{text} by {self._version}" for text in inputs]
"""

UVICORN = ["uvicorn", "--port", "0", "--no-use-colors", "--no-access-log"]
UVICORN += ["--workers", "2", "--timeout-worker-healthcheck", "300", "server:app"]
# The script: gunicorn repeats its command line at SIGUSR2, and cannot repeat `python -m gunicorn`.
GUNICORN = [str(Path(sys.executable).with_name("gunicorn")), "--bind", "127.0.0.1:0"]
GUNICORN += ["--worker-class", "uvicorn_worker.UvicornWorker", "--workers", "2", "server:app"]

STARTED, FINISHED = "Application startup complete", "Finished server process"


def wait_twice(server: Server, pattern: str) -> None:
    for _ in range(2):
        server.wait_for(pattern)


@pytest.mark.parametrize("name", ["uvicorn", *long("gunicorn")])
def test_no_request_waits_for_a_new_model(
    serve: Callable[..., Server],
    load: Callable[..., Load],
    thread: ThreadPoolExecutor,
    hosts: Hosts,
    gate: Gate,
    tmp_path: Path,
    name: str,
) -> None:
    (code,) = CODE.findall((ROOT / "docs" / "deployment.md").read_text())
    (tmp_path / "server.py").write_text(code)
    (tmp_path / "classifier.py").write_text(CLASSIFIER)
    weights, pid = tmp_path / "weights", tmp_path / "pid"

    def deploy(version: int, *how: Any) -> None:
        (tmp_path / "next").write_text(json.dumps([version, *how]))
        (tmp_path / "next").rename(weights)

    def answer_while_loading() -> None:
        """The new model does not end its load before the clients have got enough answers."""
        visit = gate.wait()
        clients.wait_for(UNDER_WAY)
        visit.let_on()

    deploy(1, 0, "")
    server = serve(
        "",
        command=UVICORN if name == "uvicorn" else [*GUNICORN, "--pid", str(pid)],
        settings={
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}",
            "WEIGHTS": str(weights),
            "RELOAD_TOKEN": "secret",
        },
    )
    url = server.wait_for(URL)[1]
    wait_twice(server, STARTED)
    clients = load(
        url,
        "/classify?text={}",
        lambda number, answer: re.fullmatch(rf"{number} by \d", answer) is not None,
    )
    clients.wait_for(UNDER_WAY)

    # The reload.
    deploy(2, SECONDS, gate.path)
    assert post(f"{url}/reload").status_code == 401
    assert post(f"{url}/reload", headers={"Authorization": "Bearer x"}).status_code == 401
    reloaded = thread.submit(post, f"{url}/reload", headers=HEADERS)
    visit = gate.wait()
    again = post(f"{url}/reload", headers=HEADERS)
    assert (again.status_code, "a reload runs" in again.text) == (409, True)
    clients.wait_for(UNDER_WAY)
    visit.let_on()
    assert reloaded.result().json() == 1
    assert get(f"{url}/classify?text=cat").json() == "cat by 2"
    clients.wait_for(UNDER_WAY)
    assert clients.dropped == []

    # New processes.
    deploy(3, SECONDS, gate.path)
    if name == "uvicorn":
        server.process.send_signal(signal.SIGHUP)
        answer_while_loading()
        main = server.process.pid
    else:
        server.process.send_signal(signal.SIGUSR2)
        answer_while_loading()
        wait_twice(server, STARTED)
        main = int(pid.with_suffix(".2").read_text())
        server.process.send_signal(signal.SIGTERM)
    wait_twice(server, FINISHED)
    assert get(f"{url}/classify?text=cat").json() == "cat by 3"
    clients.wait_for(UNDER_WAY)

    os.kill(main, signal.SIGTERM)
    server.wait_for_exit()
    hosts.wait_until_nothing_lives()
    clients.stop()
    assert clients.wrong == []
