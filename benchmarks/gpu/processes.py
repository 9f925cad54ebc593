"""Part `processes`: several workers on one device, without and with NVIDIA's MPS.

The model is small, so that one worker leaves the GPU idle between kernels. MPS lets kernels of
several processes run at the same time. The part starts its own daemon, in a folder of its own.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.part import Run
from fast_batcher import DynBatcher
from fast_batcher.errors import BatcherError

TABLE = "processes"
MODEL = "benchmarks.gpu.models:EncoderModel"
CONTROL = "nvidia-cuda-mps-control"
# Clients and daemon find each other by these variables.
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Commands to the daemon are answered at once; it starts and ends within seconds.
CONTROL_LIMIT = 15.0
# A worker imports PyTorch and starts CUDA. A client of a broken daemon waits for ever.
START_LIMIT = 40.0
BATCH_SIZE, TOKENS, TEXTS = 8, 32, 64

Batcher = DynBatcher[Any, Any]


def measure(run: Run) -> None:
    """Open all batchers, then let them take turns."""
    run.note("processes: `devices` pins workers to cores for CPUs only, so no row pins them")
    with (
        tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder,
        mps_daemon(run, folder) as mps,
    ):
        asyncio.run(_measure(run, mps))


@contextmanager
def mps_daemon(run: Run, folder: str) -> Iterator[dict[str, str]]:
    """Run an MPS daemon; yield the variables of its clients, or none where it does not start."""
    if not run.is_gpu or shutil.which(CONTROL) is None:
        reason = f"{CONTROL} is not installed" if run.is_gpu else "there is no GPU"
        run.note(f"processes: no rows with MPS: {reason}")
        yield {}
        return
    variables = {PIPES: f"{folder}/pipes", LOGS: f"{folder}/logs"}
    for path in variables.values():
        Path(path).mkdir()
    try:
        said = control(variables, folder, "-d")
        # Only a daemon that runs answers.
        if said is None or control(variables, folder, command="get_server_list\n") is None:
            run.note(f"processes: no rows with MPS: {read_log(folder)}")
            yield {}
        else:
            yield variables
    finally:
        control(variables, folder, command="quit -t 5\n")


def control(
    variables: dict[str, str], folder: str, *arguments: str, command: str = ""
) -> str | None:
    """Run the daemon's control program; None if it fails."""
    # The daemon counts GPUs as the driver does, so that the numbers of its clients hold.
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}
    # Files: the daemon keeps the output of its starter open.
    with Path(folder, "said").open("w+") as output, Path(folder, "command").open("w+") as source:
        source.write(command)
        source.seek(0)
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [CONTROL, *arguments],
                env=environment | variables,
                stdin=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=CONTROL_LIMIT,
                check=False,
            )
            output.seek(0)
            return output.read() if done.returncode == 0 else None
    return None


def read_log(folder: str) -> str:
    """Return the last line of each log of the daemon, and the output of its last command."""
    files = [Path(folder, "said"), *sorted(Path(folder, "logs").glob("*.log"))]
    lines = [file.read_text(errors="replace").strip().splitlines()[-1:] for file in files]
    return " | ".join(line[0] for line in lines if line) or "the daemon gives no reason"


async def _measure(run: Run, mps: dict[str, str]) -> None:
    kwargs = {"dtype": run.dtype, "hidden": run.pick(384, 64), "layers": run.pick(12, 2)}
    counts = run.pick((1, 2, 3), (1, 2))
    callers = 4 * max(counts) * BATCH_SIZE
    shape = f"{kwargs['layers']} layers of {kwargs['hidden']}, {run.dtype}, {TOKENS} tokens"
    run.title(TABLE, f"Encoder, {shape}, batches of {BATCH_SIZE}, {callers} callers")
    texts = [np.full(TOKENS, 1 + index) for index in range(TEXTS)]
    async with AsyncExitStack() as stack:

        async def open_all(suffix: str) -> dict[str, Batcher]:
            batchers = {
                f"{count} worker{'s' * (count > 1)}{suffix}": Batcher(
                    MODEL,
                    BATCH_SIZE,
                    devices=run.device,
                    workers_per_device=count,
                    model_kwargs=kwargs,
                    start_timeout=START_LIMIT,
                    # At its time limit the part has to end quickly, with its daemon.
                    drain_timeout=1.0,
                )
                for count in counts
            }
            entered = map(stack.enter_async_context, batchers.values())
            # All of them, so that none is still starting when the measurements begin.
            outcomes = await asyncio.gather(*entered, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            return batchers

        systems = await open_all("")
        if mps:
            systems |= await open_with_mps(run, mps, open_all)
        for batcher in systems.values():
            await run.closed_loop(partial(_ask, batcher), texts, callers)
        for repetition, (name, batcher) in run.take_turns([*systems.items()]):
            figures = await run.closed_loop(partial(_ask, batcher), texts, callers)
            run.tell(TABLE, name, repetition, figures)


async def open_with_mps(
    run: Run, mps: dict[str, str], open_all: Callable[[str], Awaitable[dict[str, Batcher]]]
) -> dict[str, Batcher]:
    """Open the batchers as clients of the daemon; none of them if a worker does not start."""
    # Workers inherit the environment of this process when they start.
    os.environ.update(mps)
    folder = str(Path(mps[LOGS]).parent)
    try:
        batchers = await open_all(", MPS")
    except BatcherError as error:
        run.note(f"processes: no rows with MPS: {error!s:.300}: {read_log(folder)}")
        return {}
    finally:
        for name in mps:
            del os.environ[name]
    # The daemon starts a server for its first client.
    if not (control(mps, folder, command="get_server_list\n") or "").strip():
        run.note(f"processes: no rows with MPS: the workers have not used it: {read_log(folder)}")
        return {}
    return batchers


async def _ask(batcher: Batcher, text: NDArray[np.int64]) -> bool:
    first, tokens, _ = await batcher.process_batched(text)
    return bool((first, tokens) == (text[0], TOKENS))
