"""What does the scheduler cost a request, compared with the scheduler of another revision?

`submit`, `poll` and `batch_done` in a loop, in batches of 64 that go through the queue, without a
pipe or an event loop. Both revisions run in processes of their own, in the order A B B A, so that a
drift of the machine concerns both alike. The code of the revision is what git has of it; the other
is the working tree.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BATCH_SIZE = 64
# Requests of one measurement: a fifth of a second.
BATCHES = 5000
# What the policy, deadlines and their like may cost a request that makes no use of them.
BAR_US = 0.3
# Runs in either revision: it uses only what both have.
LOOP = """
import json, sys, time
from fast_batcher._core.messages import Dispatch, Request
from fast_batcher._core.policy import make_policy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher.stats import Counters

name, batch_size, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
scheduler = Scheduler(
    make_policy(name, None), Counters(), max_batch_size=batch_size, max_queue_size=1024,
    timeout=30.0, infer_timeout=None, idempotent=True, isolate_errors=True,
)
scheduler.worker_ready(0.0, 0)
now = 0.0

def turn(requests):
    # A batch is running, the next one has come; then the first is answered.
    global now, running
    now += 0.001
    scheduler.submit(now, requests)
    actions, _ = scheduler.poll(now)
    for action in actions:
        running.append(action.batch)
    now += 0.004
    batch = running.pop(0)
    scheduler.batch_done(now, 0, batch.id)
    for request in batch.requests:
        request.is_settled = True
    actions, _ = scheduler.poll(now)
    for action in actions:
        running.append(action.batch)

running = []
make = [[Request(None, None) for _ in range(batch_size)] for _ in range(batches)]
for requests in make[:batches // 5]:
    turn(requests)
start = time.process_time()
for requests in make[batches // 5:]:
    turn(requests)
seconds = time.process_time() - start
print(json.dumps(1e6 * seconds / (batch_size * (batches - batches // 5))))
"""


def export(revision: str, folder: Path) -> None:
    """Write the package as it is in that revision into the folder."""
    archive = subprocess.run(
        ["git", "archive", revision, "fast_batcher"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def measure(code: Path, policy: str, batches: int) -> float:
    """Microseconds of CPU per request with the package that lies in this folder."""
    result = subprocess.run(
        [sys.executable, "-c", LOOP, policy, str(BATCH_SIZE), str(batches)],
        cwd=code,
        check=True,
        capture_output=True,
        text=True,
    )
    cost: float = json.loads(result.stdout)
    return cost


def main() -> int:
    """Measure, print; 1 if the bar is not held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="what to compare with, as git names it")
    parser.add_argument("--repetitions", type=int, default=10, help="of A B B A")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--policy", default="adaptive", choices=("adaptive", "greedy", "fixed"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder)
        export(arguments.revision, before)
        more: list[float] = []
        costs: dict[Path, list[float]] = {before: [], ROOT: []}
        for _ in range(arguments.repetitions):
            order = (before, ROOT, ROOT, before)
            found = [measure(code, arguments.policy, arguments.batches) for code in order]
            for code, cost in zip(order, found, strict=True):
                costs[code].append(cost)
            more.append((found[1] + found[2] - found[0] - found[3]) / 2)
    difference = statistics.median(more)
    print(f"{arguments.revision}: {statistics.median(costs[before]):.3f} us per request")
    print(f"working tree: {statistics.median(costs[ROOT]):.3f} us per request")
    print(f"difference: {difference:+.3f} us ({min(more):+.3f} to {max(more):+.3f})")
    is_held = difference <= BAR_US
    print(f"{'held' if is_held else 'NOT HELD'}: at most {BAR_US} us more")
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
