"""The soaks by name, and one in a process of its own, where nothing of a `__main__` is found."""

import asyncio
import multiprocessing
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import uvloop

from benchmarks.soak.kills import s1, s2
from benchmarks.soak.lives import s3, s5, s7
from benchmarks.soak.payloads import s6
from benchmarks.soak.report import Findings
from benchmarks.soak.steady import s4

SCENARIOS: dict[str, Callable[[bool, int], Coroutine[Any, Any, Findings]]] = {
    "S1": s1,
    "S2": s2,
    "S3": s3,
    "S4": s4,
    "S5": s5,
    "S6": s6,
    "S7": s7,
}


def run(name: str, short: bool, seed: int, loop: str, seconds: float | None) -> Findings:
    """One scenario, in this process."""
    scenario = SCENARIOS[name]
    started = s4(short, seed, seconds) if scenario is s4 else scenario(short, seed)
    return uvloop.run(started) if loop == "uvloop" else asyncio.run(started)


def run_afresh(*arguments: Any) -> Findings:
    """The same in a process of its own: what others leave in its memory is not the scenario's."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(run, *arguments).result()
