"""Texts of unlike lengths, and a queue of them. Runs in the measured process.

Lengths of what people send are spread out: most texts are short and a few are very long. A
log-normal distribution is the usual model of that.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random

from benchmarks.cpu import TreeCpu
from benchmarks.scenarios import Figures, Load, Process, cpu_per_request, percentiles

SENTENCES = Path(__file__).resolve().parent.parent / "examples" / "embeddings" / "sentences.txt"
# Words of a text: the median, and the deviation of the logarithm, that of the simulation's costs.
# The model reads 256 tokens, about 200 words; one text in a hundred is longer.
MEDIAN_WORDS = 20
SIGMA = 1.0
# Texts are sent once each, and as many whatever the system: in a time that is fixed, a system that
# leaves the long ones for later would have less to do. So many for each second that is asked for.
TEXTS_PER_SECOND = 100
# Of the texts before, which nobody counts, so that the queue and the model are warm.
WARM_UP_TEXTS = 128


@cache
def _words() -> list[str]:
    return SENTENCES.read_text().split()


def text_of(number: int, seed: int) -> str:
    """The words from anywhere in the sentences, as many as drawn; the same for the same numbers."""
    random = Random(f"texts {seed} {number}")
    count = max(1, round(MEDIAN_WORDS * random.lognormvariate(0.0, SIGMA)))
    words = _words()
    start = random.randrange(len(words))
    return " ".join(itertools.islice(itertools.cycle(words), start, start + count))


async def queue_of_texts(process: Process, load: Load) -> Figures:
    """Requests/s and latency while `callers` texts wait or run, until all are answered."""
    count = max(1, round(TEXTS_PER_SECOND * load.seconds))
    # Drawn before, so that this takes no time from the system.
    texts = [text_of(number, load.seed) for number in range(WARM_UP_TEXTS + count)]
    latencies: list[float] = []

    async def call(rest: Iterator[str]) -> None:
        for text in rest:
            asked = time.perf_counter()
            await process(text)
            latencies.append(time.perf_counter() - asked)

    async def ask_all(asked: list[str]) -> float:
        rest = iter(asked)
        start = time.perf_counter()
        await asyncio.gather(*(call(rest) for _ in range(load.callers)))
        return time.perf_counter() - start

    await ask_all(texts[:WARM_UP_TEXTS])
    latencies.clear()
    before = TreeCpu.read()
    elapsed = await ask_all(texts[WARM_UP_TEXTS:])
    used = TreeCpu.read().since(before)
    return {
        "requests_per_second": count / elapsed,
        **percentiles(latencies),
        **cpu_per_request(used, count),
    }


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    queue_of_texts.__name__: queue_of_texts
}
