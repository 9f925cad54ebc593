"""Whole servers: Ctrl-C, reloading, several of them, gunicorn; real processes and signals."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest
from test_fastapi import LIMIT, Gate, Server, gate, serve, thread
from waits import within

__all__ = ["gate", "serve", "thread"]

TESTS = Path(__file__).parent
URL = r"(?:running on|Listening at:) (http://[\d.:]+)"
SAID = r"server (\d+) has worker (\d+) of (\d+)"

pytestmark = pytest.mark.slow


def workers_below(pid: int) -> list[psutil.Process]:
    """Processes of ours, however deep below this one."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "from multiprocessing.spawn import spawn_main" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_f41_readiness_ends_with_the_signal_and_what_runs_is_answered(
    serve: Callable[..., Server], gate: Gate, thread: ThreadPoolExecutor
) -> None:
    server = serve("apps.draining:app")
    url = server.wait_for(URL)[1]
    with httpx2.Client(base_url=url, timeout=LIMIT) as client:
        assert client.get("/readyz").status_code == 200
        running = thread.submit(httpx2.get, f"{url}/pass/{gate.port}", timeout=LIMIT)
        gate.wait_for_visitor()
        workers = workers_below(server.process.pid)
        asking = thread.submit(httpx2.get, f"{url}/readiness-after", timeout=LIMIT)
        server.wait_for("asked")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("not ready any more")
        # What the server has accepted is still answered.
        assert asking.result(LIMIT).json() == 503
        gate.let_on()
        assert running.result(LIMIT).status_code == 200
    server.wait_for_exit()
    assert psutil.wait_procs(workers, timeout=LIMIT)[1] == []


def test_f42_the_first_ctrl_c_drains_and_the_second_ends(
    serve: Callable[..., Server], gate: Gate, thread: ThreadPoolExecutor
) -> None:
    server = serve("apps.whole:app")
    url = server.wait_for(URL)[1]
    running = thread.submit(httpx2.get, f"{url}/pass/{gate.port}", timeout=LIMIT)
    gate.wait_for_visitor()
    workers = workers_below(server.process.pid)
    # To the whole group, as a terminal does.
    os.killpg(server.process.pid, signal.SIGINT)
    server.wait_for("Waiting for connections to close|Shutting down")
    assert all(worker.is_running() for worker in workers)
    with within(3.0, "a second Ctrl-C ends the server and its workers"):
        os.killpg(server.process.pid, signal.SIGINT)
        server.wait_for_exit()
        assert psutil.wait_procs(workers, timeout=LIMIT)[1] == []
    # The caller is told, or its connection is gone.
    error = running.exception(LIMIT)
    assert isinstance(error, httpx2.TransportError) or running.result().status_code in (500, 503)
    # Tracebacks in the log are uvicorn's, of tasks that it cancels; none is of an error of ours.
    assert not re.search(r"fast_batcher\.errors|Exception ignored|leaked", server.output)


def test_sigterm_to_the_group_leaves_the_worker_to_answer_what_was_accepted(
    serve: Callable[..., Server], gate: Gate
) -> None:
    """As systemd sends it by default: to the server and to the worker, whose model loads once."""
    server = serve("apps.grouped:app")
    url = server.wait_for(URL)[1]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(httpx2.get, f"{url}/pass/{gate.port}", timeout=LIMIT)]
        gate.wait_for_visitor()
        # These wait in the app, for the worker is not free.
        calls += [pool.submit(httpx2.get, f"{url}/pass/0", timeout=LIMIT) for _ in range(4)]
        while httpx2.get(f"{url}/accepted", timeout=LIMIT).json() < len(calls):
            pass
        (worker,) = workers_below(server.process.pid)
        os.killpg(server.process.pid, signal.SIGTERM)
        server.wait_for("Shutting down")
        gate.let_on()
        assert [one.result(LIMIT).json() for one in calls] == [worker.pid] * len(calls)
    server.wait_for_exit()
    assert psutil.wait_procs([worker], timeout=LIMIT)[1] == []
    assert not re.search("is replaced|ended with|Traceback", server.output)


@pytest.fixture
def reloaded(tmp_path: Path) -> Iterator[Server]:
    app = tmp_path / "reloaded.py"
    shutil.copy(TESTS / "apps" / "whole.py", app)
    server = Server("reloaded:app", "--reload", "--reload-dir", str(tmp_path), folder=tmp_path)
    yield server
    server.close()


def test_f57_reloading_leaves_as_many_workers_as_there_were(
    reloaded: Server, tmp_path: Path
) -> None:
    url = reloaded.wait_for(URL)[1]
    seen: set[str] = set()
    for number in range(6):
        seen.add(reloaded.wait_for(SAID)[2])
        reloaded.wait_for("Application startup complete")
        assert httpx2.get(f"{url}/readyz", timeout=LIMIT).status_code == 200
        # Two batchers with a worker each, and the server itself, which uvicorn spawns as well.
        assert len(workers_below(reloaded.process.pid)) == 3
        if number < 5:
            with (tmp_path / "reloaded.py").open("a") as file:
                file.write(f"# {number}\n")
    assert len(seen) == 6
    everyone = psutil.Process(reloaded.process.pid).children(recursive=True)
    reloaded.process.send_signal(signal.SIGTERM)
    reloaded.wait_for_exit()
    assert psutil.wait_procs(everyone, timeout=LIMIT)[1] == []


def test_f57_four_uvicorn_workers_have_four_times_the_processes(
    serve: Callable[..., Server],
) -> None:
    server = serve("apps.whole:app", "--workers", "4")
    url = server.wait_for(URL)[1]
    said = [server.wait_for(SAID).groups() for _ in range(4)]
    assert len({one for one, _, _ in said}) == len({worker for _, worker, _ in said}) == 4
    assert httpx2.get(f"{url}/readyz", timeout=LIMIT).status_code == 200
    everyone = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_exit()
    assert psutil.wait_procs(everyone, timeout=LIMIT)[1] == []


def test_f49_gunicorn_with_preload_has_a_batcher_per_process() -> None:
    """The app is imported, and the batcher made, before the fork; it is opened after it."""
    command = ["gunicorn", "--preload", "--workers", "2", "--bind", "127.0.0.1:0"]
    worker_class = ["--worker-class", "uvicorn_worker.UvicornWorker", "--chdir", str(TESTS)]
    server = Server("", command=[*command, *worker_class, "apps.whole:app"])
    try:
        url = server.wait_for(URL)[1]
        said = [server.wait_for(SAID).groups() for _ in range(2)]
        assert len({one for one, _, _ in said}) == len({worker for _, worker, _ in said}) == 2
        assert all(parent == one for one, _, parent in said)
        server.wait_for("Application startup complete")
        assert httpx2.get(f"{url}/readyz", timeout=LIMIT).status_code == 200
        everyone = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_exit() == 0
        assert psutil.wait_procs(everyone, timeout=LIMIT)[1] == []
        assert not re.search("Traceback|leaked", server.output)
    finally:
        server.close()
