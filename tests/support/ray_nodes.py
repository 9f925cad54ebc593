"""A Ray cluster on this machine, and the program that keeps its nodes.

The nodes are children of the program, not of the tests: a test may kill a node and start another,
and has no new child then. Each line of the program's input is a command, and each line of its
output the answer.
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from paths import PYTHONPATH
from shared_hosts import Hosts
from waits import LIMIT

# Ray's own limits are made for networks: here a node that does not answer is dead.
FAST = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
MEGABYTE = 2**20
# Addresses of the nodes.
HEAD, OTHER = "127.0.0.1", "127.0.0.2"


def _has_ray() -> bool:
    # A spec would be found for the folder tests/ray, too.
    try:
        importlib.metadata.distribution("ray")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_ray = pytest.mark.skipif(not _has_ray(), reason="ray is not installed")


class RayCluster:
    """The program, as the tests see it."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(dir="/tmp", prefix="r")
        self._program = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ray notes its last cluster in that directory, for all programs that look there.
            env={**os.environ, **FAST, "PYTHONPATH": PYTHONPATH, "RAY_TMPDIR": self.directory},
        )
        self.address: str = self._command("start", HEAD)

    def start(self, ip: str) -> None:
        """Start a node."""
        self._command("start", ip)

    def kill(self, ip: str) -> None:
        """Kill all processes of a node."""
        self._command("kill", ip)

    def stop(self) -> None:
        """End all nodes."""
        self._program.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _command(self, *words: str) -> Any:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(words) + "\n")
        self._program.stdin.flush()
        return json.loads(self._program.stdout.readline())


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayCluster]:
    """A cluster of two nodes, the same for the tests of a module, which leave it as it was."""
    cluster = RayCluster()
    try:
        cluster.start(OTHER)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(nodes: RayCluster, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster, for batchers of this test, whose hosts end with it."""
    for name, value in FAST.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    return nodes


class Keeper:
    """The nodes, in the program."""

    def __init__(self) -> None:
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        # Kept over a restart of the head.
        with socket.socket() as listener:
            listener.bind((HEAD, 0))
            self._port = listener.getsockname()[1]
        self.address = f"{HEAD}:{self._port}"

    def start(self, ip: str) -> str:
        """Start a node, and wait until it runs; the head has the first address."""
        role = ["--address", self.address]
        if ip == HEAD:
            role = ["--head", "--port", str(self._port), "--include-dashboard", "false"]
        node = self._nodes[ip] = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
                *("--node-ip-address", ip, "--num-cpus", "2", "--num-gpus", "0"),
                *("--object-store-memory", str(100 * MEGABYTE), "--disable-usage-stats"),
                *("--resources", json.dumps({f"at_{ip}": 100})),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert node.stdout is not None
        said = []
        watchdog = threading.Timer(LIMIT, os.killpg, (node.pid, signal.SIGKILL))
        watchdog.daemon = True
        watchdog.start()
        while "Ray runtime started" not in (line := node.stdout.readline()):
            said.append(line)
            assert line, f"the node has ended: {''.join(said)}"
        watchdog.cancel()
        return self.address

    def kill(self, ip: str) -> None:
        """Kill the processes of a node, as a loss of power does."""
        node = self._nodes.pop(ip)
        family = psutil.Process(node.pid).children(recursive=True)
        os.kill(node.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                process.kill()
        node.communicate()
        psutil.wait_procs(family)

    def stop(self) -> None:
        """End all nodes, without a trace."""
        family = []
        for node in self._nodes.values():
            family += [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
            os.kill(node.pid, signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=10)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)


def main() -> None:
    """Carry out the commands until the input ends."""
    keeper = Keeper()
    try:
        for line in sys.stdin:
            command, *words = json.loads(line)
            sys.stdout.write(json.dumps(getattr(keeper, command)(*words)) + "\n")
            sys.stdout.flush()
    finally:
        keeper.stop()


if __name__ == "__main__":
    main()
