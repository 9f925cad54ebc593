"""Measures one system under one load in a fresh process and prints JSON.

Imports only the standard library and the one system: each peer has its own environment.
"""

import asyncio
import importlib
import json
import os
import platform
import sys
from importlib import metadata
from typing import Any

from benchmarks import arrays, loops, scenarios, stream_loads
from benchmarks.cpu import read_ticks, stolen_percent
from benchmarks.scenarios import Figures, Load, bare_loop

SCENARIOS = scenarios.SCENARIOS | arrays.SCENARIOS | loops.SCENARIOS | stream_loads.SCENARIOS


async def _measure(adapter: Any, job: dict[str, Any]) -> None:
    load = Load(**job["load"])
    async with adapter.opened(load, **job["settings"]) as process:
        answer = await process(load.payload())
        if not load.is_right(answer):
            raise RuntimeError(f"{job['adapter']} answered {answer!r:.100}")
        before = read_ticks()
        figures = await SCENARIOS[job["scenario"]](process, load)
        # Before the system closes: some take a minute, or never end after an overload.
        _tell(job, adapter.DISTRIBUTIONS, figures, before)
        os._exit(0)


def _loop_factory(name: str) -> Any:
    if name == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "from the source tree"


def _tell(
    job: dict[str, Any], distributions: list[str], figures: Figures, before: tuple[int, int]
) -> None:
    stolen = stolen_percent(before, read_ticks())
    if job["loop"] == "uvloop":
        distributions = ["uvloop", *distributions]
    versions = {name: _version(name) for name in distributions}
    versions = {"python": platform.python_version(), **versions}
    outcome = {"figures": figures, "versions": versions, "stolen_percent": stolen}
    print(json.dumps(outcome), flush=True)


def main() -> None:
    """Measure what the first argument says as JSON; see `harness.measure`."""
    job = json.loads(sys.argv[1])
    if job["adapter"] is None:
        before = read_ticks()
        _tell(job, [], bare_loop(Load(**job["load"])), before)
    else:
        adapter = importlib.import_module(f"benchmarks.systems.{job['adapter']}")
        with asyncio.Runner(loop_factory=_loop_factory(job["loop"])) as runner:
            runner.run(_measure(adapter, job))


if __name__ == "__main__":
    main()
