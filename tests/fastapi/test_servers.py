"""Whole servers: Ctrl-C, SIGTERM, reloading, recycling; real processes, signals and load."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest
from paths import SUPPORT
from server_load import GUNICORN, UNDER_WAY, URL, Load, load
from servers import Gate, Server, find_free_port, gate, get, serve, thread, wait_until_listening
from waits import LIMIT, measured

__all__ = ["gate", "load", "serve", "thread"]

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


def end_quietly(server: Server) -> None:
    """End a server without load with SIGTERM; all its processes end."""
    everyone = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_for_exit() in (0, -signal.SIGTERM)
    assert psutil.wait_procs(everyone, timeout=LIMIT)[1] == []


def test_readiness_ends_at_signal_and_requests_finish(
    serve: Callable[..., Server], gate: Gate, thread: ThreadPoolExecutor
) -> None:
    """Fault F41."""
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


def test_lame_duck_answers_new_connections_after_sigterm(serve: Callable[..., Server]) -> None:
    """Fault F41."""
    server = serve("apps.draining:app", settings={"LAME_DUCK": str(LIMIT)})
    url = server.wait_for(URL)[1]
    assert get(f"{url}/readyz").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("not ready any more")
    # Each of these is a connection of its own.
    assert get(f"{url}/readyz").status_code == 503
    assert get(f"{url}/pass/0").status_code == 200
    # The second signal ends the wait.
    end_quietly(server)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        pytest.param(None, signal.SIGINT, id="uvicorn, Ctrl-C"),
        pytest.param(None, signal.SIGTERM, id="uvicorn"),
        pytest.param([*GUNICORN, "apps.loading:app"], signal.SIGTERM, id="gunicorn"),
    ],
)
def test_signal_while_the_model_loads_ends_the_server(
    serve: Callable[..., Server], gate: Gate, command: list[str] | None, number: signal.Signals
) -> None:
    server = serve("apps.loading:app", command=command, settings={"GATE": str(gate.port)})
    gate.wait_for_visitor()
    everyone = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(number)
    server.wait_for_exit()
    assert psutil.wait_procs(everyone, timeout=LIMIT)[1] == []


def test_first_ctrl_c_drains_and_second_ends(
    serve: Callable[..., Server], gate: Gate, thread: ThreadPoolExecutor
) -> None:
    """Fault F42."""
    server = serve("apps.whole:app")
    url = server.wait_for(URL)[1]
    running = thread.submit(httpx2.get, f"{url}/pass/{gate.port}", timeout=LIMIT)
    gate.wait_for_visitor()
    workers = workers_below(server.process.pid)
    # To the whole group, as a terminal does.
    os.killpg(server.process.pid, signal.SIGINT)
    server.wait_for("Waiting for connections to close|Shutting down")
    assert all(worker.is_running() for worker in workers)
    with measured(3.0, "a second Ctrl-C ends the server and its workers"):
        os.killpg(server.process.pid, signal.SIGINT)
        server.wait_for_exit()
        assert psutil.wait_procs(workers, timeout=LIMIT)[1] == []
    # The caller is told, or its connection is gone.
    error = running.exception(LIMIT)
    assert isinstance(error, httpx2.TransportError) or running.result().status_code in (500, 503)
    # Tracebacks in the log are uvicorn's, of tasks that it cancels; none is of an error of ours.
    assert not re.search(r"fast_batcher\.errors|Exception ignored|leaked", server.output)


def test_worker_answers_accepted_requests_after_group_sigterm(
    serve: Callable[..., Server], gate: Gate
) -> None:
    """As systemd sends it by default: to the server and to the worker, whose model loads once."""
    server = serve("apps.grouped:app")
    url = server.wait_for(URL)[1]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(get, f"{url}/pass/{gate.port}")]
        gate.wait_for_visitor()
        # These wait in the app, for the worker is not free.
        calls += [pool.submit(get, f"{url}/pass/0") for _ in range(4)]
        while get(f"{url}/accepted").json() < len(calls):
            pass
        (worker,) = workers_below(server.process.pid)
        os.killpg(server.process.pid, signal.SIGTERM)
        server.wait_for("Shutting down")
        gate.let_on()
        assert [one.result(LIMIT).json() for one in calls] == [worker.pid] * len(calls)
    server.wait_for_exit()
    assert psutil.wait_procs([worker], timeout=LIMIT)[1] == []
    assert not re.search("is replaced|ended with|Traceback", server.output)


def test_reloading_leaves_the_number_of_workers_unchanged(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    """Fault F57."""
    shutil.copy(SUPPORT / "apps" / "whole.py", tmp_path / "reloaded.py")
    # After each reload, uvicorn misses a change that comes before its first look, this delay later.
    options = ["--reload", "--reload-dir", str(tmp_path), "--reload-delay", "0.01"]
    reloaded = serve("reloaded:app", *options, folder=tmp_path)
    url = reloaded.wait_for(URL)[1]
    seen: set[str] = set()
    for number in range(6):
        seen.add(reloaded.wait_for(SAID)[2])
        reloaded.wait_for("Application startup complete")
        wait_until_listening(url)
        assert get(f"{url}/readyz").status_code == 200
        # Two batchers with a worker each, and the server itself, which uvicorn spawns as well.
        assert len(workers_below(reloaded.process.pid)) == 3
        if number < 5:
            with (tmp_path / "reloaded.py").open("a") as file:
                file.write(f"# {number}\n")
    assert len(seen) == 6
    end_quietly(reloaded)


@pytest.mark.parametrize(
    ("command", "count"),
    [
        (["uvicorn", "apps.whole:app", "--port", "0", "--workers", "2"], 2),
        ([*GUNICORN, "--preload", "apps.whole:app"], 2),
    ],
    ids=["uvicorn", "gunicorn, preloaded"],
)
def test_each_server_process_has_its_own_batcher(
    serve: Callable[..., Server], command: list[str], count: int
) -> None:
    """Faults F49 and F57: preloaded, it is constructed before the fork and opened after it."""
    server = serve("", command=command)
    url = server.wait_for(URL)[1]
    said = [server.wait_for(SAID).groups() for _ in range(count)]
    assert len({one for one, _, _ in said}) == len({worker for _, worker, _ in said}) == count
    assert all(parent == one for one, _, parent in said)
    server.wait_for("Application startup complete")
    wait_until_listening(url)
    assert get(f"{url}/readyz").status_code == 200
    end_quietly(server)
    assert not re.search("Traceback|leaked", server.output)


# --- under load -----------------------------------------------------------------------------------

BEGINS = r"server (\d+) begins"
# Of a process that was loading when the server was ended: of uvicorn about the start, and of
# gunicorn where it sees the process end before it handles the signal itself.
STOPPED_AT_START = (
    r"Traceback(?:.|\n)*?(?:BatcherClosedError: SlowDoubler was told to stop before it was ready|"
    r"HaltServer: <HaltServer 'Worker failed to boot.' 3>)"
)
ENDS = r"server \d+ has answered (\d+) of (\d+)"
APP = "apps.counted:app"
UVICORN = ["uvicorn", APP, "--port", "0", "--no-use-colors", "--no-access-log"]


def end(server: Server, load: Load, *, is_group: bool = True) -> None:
    """End a server under load with SIGTERM, as a supervisor does; all its processes end.

    systemd, unless it is told otherwise, sends the signal to all processes of a service.
    """
    load.wait_for(UNDER_WAY)
    everyone = psutil.Process(server.process.pid).children(recursive=True)
    (os.killpg if is_group else os.kill)(server.process.pid, signal.SIGTERM)
    server.wait_for_exit()
    load.stop()
    assert psutil.wait_procs(everyone, timeout=LIMIT)[1] == []
    assert load.wrong == []


def assert_nothing_was_lost(server: Server, load: Load) -> None:
    """Each request that an endpoint began with was answered, and each answer reached its client."""
    counts = [(int(answered), int(begun)) for answered, begun in re.findall(ENDS, server.output)]
    output = re.sub(STOPPED_AT_START, "", server.output)
    assert len(counts) == len(re.findall(BEGINS, output))
    assert all(answered == begun for answered, begun in counts), counts
    assert sum(answered for answered, _ in counts) == load.answered
    # No worker was lost on the way, and nothing else went wrong.
    output = re.sub(r"INFO:     fast_batcher: .*", "", output)  # of the start
    complaint = r".*(?:Traceback|Exception ignored|leaked|SlowDoubler: ).*"
    assert re.findall(complaint, output) == []


GRANIAN = ["granian", "--interface", "asgi", "--workers", "2", APP, "--port"]


@pytest.mark.parametrize(
    ("command", "is_group"),
    [
        pytest.param(UVICORN, True, id="uvicorn"),
        pytest.param([*UVICORN, "--workers", "2"], True, id="uvicorn, two workers"),
        pytest.param(
            [*GUNICORN, "--preload", APP],
            True,
            id="gunicorn, preloaded",
            marks=pytest.mark.long,
        ),
        # Not to the group: Granian sends its workers a signal of its own, and a worker that gets
        # two at once may hang for ever in its handler (2.8.7, `WorkerSignal.set`).
        pytest.param(GRANIAN, False, id="granian"),
    ],
)
def test_sigterm_loses_nothing_that_was_accepted(
    serve: Callable[..., Server], load: Callable[[str], Load], command: list[str], *, is_group: bool
) -> None:
    if command is GRANIAN:
        command = [*GRANIAN, str(find_free_port())]
    server = serve("", command=[*command])
    clients = load(server.wait_for(URL)[1])
    end(server, clients, is_group=is_group)
    assert_nothing_was_lost(server, clients)


def test_group_sigterm_leaves_nothing_of_hypercorn(
    serve: Callable[..., Server], load: Callable[[str], Load]
) -> None:
    """Its server processes handle no SIGTERM, so they end at once and their connections close.

    What it answers at its end is its own affair, with one process too; S9 of the soaks tells.
    """
    server = serve("", command=["hypercorn", "--workers", "2", "--bind", "127.0.0.1:0", APP])
    end(server, load(server.wait_for(URL)[1]))


def test_gunicorn_that_recycles_its_processes_loses_nothing(
    serve: Callable[..., Server], load: Callable[[str], Load]
) -> None:
    server = serve("", command=[*GUNICORN, "--max-requests", "40", APP])
    clients = load(server.wait_for(URL)[1])
    for _ in range(4):  # two at first, then one for each that has ended
        server.wait_for(BEGINS)
    end(server, clients)
    assert_nothing_was_lost(server, clients)
