"""The connection of the host process to a Ray cluster: Ray's driver. Host process.

    spawner thread    connect
    call thread       `ray.init`, then every call of an actor, in order: such a call blocks while
                      the object store is full, and copies large inputs
    node thread       looks at the nodes of the cluster, once a second

Both threads live as long as the process. Ray is initialized on a thread, because on the main thread
it replaces the signal handlers. Ray ends this process 60 s after the head of the cluster is gone;
the next host connects again.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from fast_batcher._process import monotonic
from fast_batcher.errors import WorkerStartupError
from fast_batcher.ray import RayWorkers

logger = logging.getLogger("fast_batcher")

# Seconds for a connection to an address that was given, before Ray tries: Ray retries for minutes.
PROBE_TIMEOUT = 5.0
# Seconds for Ray to connect; it waits for minutes for a head that accepts and does not answer.
CONNECT_TIMEOUT = 20.0
# Seconds for which the next workers wait for an attempt that has taken longer.
LATE_TIMEOUT = 0.5
# Seconds after which an attempt is hopeless: it keeps the address that it has found, and the
# cluster may have another by now. It cannot be ended alone.
MOST_OF_ATTEMPT = 60.0
# Seconds between two looks at the nodes.
LOOK_INTERVAL = 1.0
# Exit code of a host that the next one replaces: EX_TEMPFAIL of sysexits.h.
TRY_AGAIN = 75

Job = Callable[[], None]
# Takes the ids of the nodes that live.
Looked = Callable[[frozenset[str]], None]


class Cluster:
    """A Ray cluster, and what the host knows of its nodes."""

    def __init__(self, workers: RayWorkers) -> None:
        self.workers = workers
        # The module; None until Ray is connected.
        self.ray: Any = None
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        # Outcome of the present attempt to connect; None without one. Spawner thread.
        self._attempt: SimpleQueue[BaseException | None] | None = None
        self._attempt_began = 0.0
        self._has_threads = False
        # Called after the next look at the nodes.
        self._questions: SimpleQueue[Looked] = SimpleQueue()
        # Ids of the workers that have no node yet. Loop's thread.
        self.unplaced: set[int] = set()
        # What the last look has found: the live nodes, and the free resources while a worker has no
        # node.
        self._nodes: list[dict[str, Any]] = []
        self._free: dict[str, float] = {}

    # Connection.

    def connect(self) -> None:
        """Connect, unless that was done before. Blocks, at most about `CONNECT_TIMEOUT`.

        Raises:
            WorkerStartupError: Ray is not installed, or there is no cluster.
        """
        if self.ray is not None:
            return
        if not self._has_threads:
            self._has_threads = True
            threading.Thread(target=self._run_jobs, name="fast_batcher-ray", daemon=True).start()
        address = self.workers.address or os.environ.get("RAY_ADDRESS") or "auto"
        seconds = LATE_TIMEOUT
        if self._attempt is None:
            seconds = CONNECT_TIMEOUT
            _probe(address)
            attempt = self._attempt = SimpleQueue()
            self._attempt_began = monotonic()
            self._jobs.put(lambda: self._try_to_connect(address, attempt))
        try:
            error = self._attempt.get(timeout=seconds)
        except Empty:  # the attempt goes on
            if monotonic() - self._attempt_began > MOST_OF_ATTEMPT:
                _end_host("Ray does not connect to the cluster")
            late = TimeoutError(f"no answer within {CONNECT_TIMEOUT:g} seconds")
            raise _explain(late, address) from None
        self._attempt = None
        if error is not None:
            raise _explain(error, address) from None

    def _try_to_connect(self, address: str, outcome: SimpleQueue[BaseException | None]) -> None:
        """Connect, and tell the spawner thread. Call thread."""
        try:
            import ray

            # Ray gives its logger a handler. Its warnings concern programs that are drivers.
            log = logging.getLogger("ray")
            log.handlers.clear()
            log.propagate = True
            log.setLevel(logging.ERROR)
            environment = self.workers.runtime_env
            ray.init(
                address=address,
                # Set for the job, not per actor: Ray uploads a local "working_dir" per job only.
                runtime_env=None if environment is None else dict(environment),
                # What actors print stays in Ray's own files: the app's output is the app's.
                log_to_driver=False,
                configure_logging=False,
            )
            node_id = ray.get_runtime_context().get_node_id()
        except BaseException as error:  # noqa: BLE001  the spawner thread raises it
            outcome.put(error)
            return
        self.ray = ray
        threading.Thread(
            target=self._watch_nodes, args=(node_id,), name="fast_batcher-ray-nodes", daemon=True
        ).start()
        outcome.put(None)

    # Calls.

    def call(self, job: Job) -> None:
        """Do something with Ray, behind everything that was given before. Any thread."""
        self._jobs.put(job)

    def _run_jobs(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                logger.exception("a call of Ray has raised")
            # It refers to a worker, and perhaps to shared memory.
            del job

    # Nodes.

    def ask(self, question: Looked) -> None:
        """Pass the live nodes to a function, on the node thread, after a look from now on."""
        self._questions.put(question)

    def _watch_nodes(self, own_node: str) -> None:
        """Look at the nodes, and end this process when the node of this machine is dead.

        Ray does not end it: it ends the actors, because the node of their owner is dead, and never
        starts others.
        """
        while True:
            questions: list[Looked] = []
            with suppress(Empty):
                questions.append(self._questions.get(timeout=LOOK_INTERVAL))
                while True:
                    questions.append(self._questions.get_nowait())
            try:
                self._nodes = [node for node in self.ray.nodes() if node["Alive"]]
                if self.unplaced:
                    self._free = self.ray.available_resources()
            except Exception as error:  # noqa: BLE001  the head is gone: Ray ends this process
                logger.debug("the nodes of the Ray cluster are not known: %s", error)
                continue
            alive = frozenset(node["NodeID"] for node in self._nodes)
            if own_node not in alive:
                _end_host("the Ray node of this machine is dead")
            for question in questions:
                question(alive)

    def describe_wait(self) -> str:
        """Describe what the workers without a node wait for; "" if all have nodes."""
        if not self.unplaced or not self._nodes:
            return ""
        demand = self.workers.demand
        text = f"{len(self.unplaced)} actors wait for a node of the Ray cluster with {demand}"
        fits = [
            node
            for node in self._nodes
            if all(node["Resources"].get(name, 0) >= amount for name, amount in demand.items())
        ]
        if not fits:
            return f"{text}; none of its {len(self._nodes)} nodes has as much"
        free = {name: round(self._free.get(name, 0), 3) for name in demand}
        return f"{text}; in all of its nodes {free} are free"


def _end_host(reason: str) -> NoReturn:
    """End this process: API processes start the next one."""
    os.write(2, f"fast_batcher: {reason}; the host process ends\n".encode())
    os._exit(TRY_AGAIN)


def _probe(address: str) -> None:
    """Check that something listens at the address of a head."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT).close()
    except OSError as error:
        raise _explain(error, address) from None


def _explain(error: BaseException, address: str) -> WorkerStartupError:
    """Make the error of a host that could not connect."""
    if isinstance(error, ImportError):
        return WorkerStartupError(
            f"workers=RayWorkers(...) needs Ray, which cannot be imported ({error}); "
            "pip install 'fast_batcher[ray]'"
        )
    reason = str(error).strip().partition("\n")[0]
    return WorkerStartupError(
        f"there is no Ray cluster for this machine at address={address!r} ({reason}); "
        "`ray start --address=HEAD:6379 --num-cpus=0` makes this machine a node of a cluster, "
        "`ray start --head` begins one"
    )
