"""The scenarios by name, and how one of them runs in a fresh process."""

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
from benchmarks.soak.servers import s9
from benchmarks.soak.shared import s10
from benchmarks.soak.steady import s4
from benchmarks.soak.steady_http import s8

SCENARIOS: dict[str, Callable[[bool, int], Coroutine[Any, Any, Findings]]] = {
    "S1": s1,
    "S2": s2,
    "S3": s3,
    "S4": s4,
    "S5": s5,
    "S6": s6,
    "S7": s7,
    "S8": s8,
    "S9": s9,
    "S10": s10,
}
# Together 40 minutes. S8 takes an hour more, and runs where it is named.
USUAL = [name for name in SCENARIOS if name != "S8"]


def run(name: str, short: bool, seed: int, loop: str) -> Findings:
    """Run one scenario in this process."""
    scenario = SCENARIOS[name](short, seed)
    return uvloop.run(scenario) if loop == "uvloop" else asyncio.run(scenario)


def run_afresh(*arguments: Any) -> Findings:
    """Run one scenario in a new process, so that no earlier scenario's memory counts."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(run, *arguments).result()
