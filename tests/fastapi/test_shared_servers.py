"""Whole servers of several processes with one model: recycling, reloading, signals."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from server_load import GUNICORN, UNDER_WAY, URL, Load, load
from servers import Server, find_free_port, serve
from shared_hosts import Hosts, hosts
from waits import LIMIT, Watch, measured

__all__ = ["hosts", "load", "serve"]

pytestmark = pytest.mark.slow
Serve = Callable[..., Server]

APP = "apps.shared:app"
BEGINS = r"server (\d+) begins"
UVICORN = ["uvicorn", APP, "--port", "0", "--no-use-colors", "--no-access-log", "--workers", "2"]
# A new process may take longer than the 5 seconds that are uvicorn's default.
PATIENT = ["--timeout-worker-healthcheck", "300"]
HYPERCORN = ["hypercorn", "--workers", "2", "--bind", "127.0.0.1:0", APP]
GRANIAN = ["granian", "--interface", "asgi", "--workers", "2", APP, "--port"]


@pytest.fixture(autouse=True)
def _environment(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES", str(hosts.notes))
    monkeypatch.setenv("MODEL", "models.sharing:Shared")


def start(serve: Serve, load: Callable[[str], Load], command: list[str]) -> tuple[Server, Load]:
    """Start a server with two processes, and clients that ask it."""
    if command is GRANIAN:
        command = [*GRANIAN, str(find_free_port())]
    server = serve("", command=command)
    url = server.wait_for(URL)[1]
    while len(re.findall(BEGINS, server.output)) < 2:
        server.wait_for(BEGINS)
    clients = load(url)
    clients.wait_for(UNDER_WAY)
    return server, clients


def end(server: Server, clients: Load, hosts: Hosts, number: int, *, is_group: bool) -> None:
    """End a server with a signal; every answer was right, and nothing is left."""
    (os.killpg if is_group else os.kill)(server.process.pid, number)
    server.wait_for_exit()
    hosts.wait_until_nothing_lives()
    clients.stop()
    assert clients.wrong == []
    # One process has logged for all, so that each record is there once.
    assert len(re.findall("model loaded in", server.output)) == hosts.loads()


TERM, CTRL_C = (signal.SIGTERM, False), (signal.SIGINT, True)
BY_CTRL_C = ("gunicorn", "hypercorn")


@pytest.mark.parametrize(
    ("command", "number", "is_group"),
    [
        pytest.param(
            command,
            *how,
            id=f"{name}-{'Ctrl-C' if how is CTRL_C else 'TERM'}",
            # Each server has one of the two signals in every run.
            marks=[] if (how is CTRL_C) == (name in BY_CTRL_C) else [pytest.mark.long],
        )
        for name, command in {
            "uvicorn": UVICORN,
            "gunicorn": [*GUNICORN, APP],
            "gunicorn, preloaded": [*GUNICORN, "--preload", APP],
            "hypercorn": HYPERCORN,
            "granian": GRANIAN,
        }.items()
        for how in (TERM, CTRL_C)
        # A worker of Granian that gets two signals at once, from the group and from its parent, may
        # hang for ever in Granian's handler (2.8.7, `WorkerSignal.set`).
        if (name, how) != ("granian", CTRL_C)
    ],
)
def test_server_processes_share_one_model(
    serve: Serve,
    load: Callable[[str], Load],
    hosts: Hosts,
    command: list[str],
    number: int,
    *,
    is_group: bool,
) -> None:
    server, clients = start(serve, load, command)
    end(server, clients, hosts, number, is_group=is_group)
    assert len(hosts.hosts()) == 1, server.output


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*UVICORN, *PATIENT], id="uvicorn"),
        pytest.param([*GUNICORN, APP], id="gunicorn", marks=pytest.mark.long),
        pytest.param(
            [*GUNICORN, "--preload", APP], id="gunicorn, preloaded", marks=pytest.mark.long
        ),
    ],
)
def test_answers_are_right_during_sighup_replacement(
    serve: Serve, load: Callable[[str], Load], hosts: Hosts, command: list[str]
) -> None:
    """Nothing has changed, so that the new processes use the loaded model."""
    server, clients = start(serve, load, command)
    server.process.send_signal(signal.SIGHUP)
    for _ in range(2):
        server.wait_for(BEGINS)
    clients.wait_for(UNDER_WAY)
    end(server, clients, hosts, signal.SIGTERM, is_group=False)
    assert hosts.loads() == 1, server.output


def test_host_does_not_wait_for_processes_with_another_host(
    serve: Serve, load: Callable[[str], Load], hosts: Hosts, tmp_path: Path
) -> None:
    config = tmp_path / "gunicorn.conf.py"
    config.write_text('raw_env = ["RELEASE=1"]')
    server, clients = start(serve, load, [*GUNICORN, "--config", str(config), APP])
    old = hosts.hosts()
    # Both may live for a moment.
    (hosts.notes / f"killed.{old[0]}").touch()
    with Watch(old) as watch:
        config.write_text('raw_env = ["RELEASE=2"]')
        server.process.send_signal(signal.SIGHUP)
        for _ in range(2):
            server.wait_for(BEGINS)
        assert watch.survivors(LIMIT) == []
    clients.wait_for(UNDER_WAY)
    end(server, clients, hosts, signal.SIGTERM, is_group=False)
    assert hosts.loads() == 2, server.output


def test_answers_are_right_while_gunicorn_recycles_its_processes(
    serve: Serve, load: Callable[[str], Load], hosts: Hosts
) -> None:
    server, clients = start(serve, load, [*GUNICORN, "--max-requests", "40", APP])
    for _ in range(2):
        server.wait_for(BEGINS)
    end(server, clients, hosts, signal.SIGTERM, is_group=False)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(UVICORN, id="uvicorn"),
        pytest.param([*GUNICORN, APP], id="gunicorn", marks=pytest.mark.long),
    ],
)
def test_model_survives_death_of_server_process(
    serve: Serve, load: Callable[[str], Load], hosts: Hosts, command: list[str]
) -> None:
    """First the process that has started the host."""
    server, clients = start(serve, load, command)
    for pid in (psutil.Process(hosts.hosts()[0]).ppid(), 0):
        own = {int(one) for one in re.findall(BEGINS, server.output)}
        os.kill(pid or max(own), signal.SIGKILL)
        server.wait_for(BEGINS)
        clients.wait_for(UNDER_WAY)
    end(server, clients, hosts, signal.SIGTERM, is_group=False)
    assert len(hosts.hosts()) == 1, server.output


def test_a_killed_host_is_replaced_under_load(
    serve: Serve, load: Callable[[str], Load], hosts: Hosts
) -> None:
    server, clients = start(serve, load, UVICORN)
    hosts.kill(hosts.hosts()[0])
    server.wait_for("model loaded in")
    clients.wait_for(UNDER_WAY)
    end(server, clients, hosts, signal.SIGTERM, is_group=False)
    assert len(hosts.hosts()) == 2, server.output


def test_killed_server_leaves_no_process_behind(
    serve: Serve, load: Callable[[str], Load], hosts: Hosts
) -> None:
    server, clients = start(serve, load, UVICORN)
    with measured(1.0, "nothing is left of a server that was killed"):
        os.killpg(server.process.pid, signal.SIGKILL)
        server.wait_for_exit()
        hosts.wait_until_nothing_lives()
    clients.stop()
    assert clients.wrong == []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(UVICORN, id="uvicorn"),
        pytest.param([*GUNICORN, APP], id="gunicorn", marks=pytest.mark.long),
    ],
)
def test_failed_load_ends_server_processes(
    serve: Serve, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("MODEL", "models.sharing:DoesNotLoad")
    server = serve("", command=command)
    for _ in range(2):
        server.wait_for("no weights at /models/tiny.bin")
    os.killpg(server.process.pid, signal.SIGTERM)
    server.wait_for_exit()
    hosts.wait_until_nothing_lives()
    assert "takes its place" not in server.output
