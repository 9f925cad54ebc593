"""Part `times`: milliseconds of one batch of the encoder, by its size and the way it is launched.

"eager" launches each kernel from Python, "CUDA graph" replays a captured graph, and "compiled" is
torch.compile(mode="reduce-overhead"), whose compiler takes long: it comes last.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.models import VOCABULARY, Encoder, make_encoder
from benchmarks.gpu.part import SEED, Run

TABLE = "times"
SIZES = (1, 2, 4, 8, 16, 32, 64)
# The compiler compiles each size separately, so the sizes that tell most come first.
COMPILED_SIZES = (8, 1, 32, 64, 16, 2, 4)
# Seconds after which no further size is compiled.
COMPILING_LIMIT = 30.0
TOKENS = 64
# Batches before capture or measurement: cuBLAS allocates its workspace, the compiler captures.
WARM_UP_BATCHES = 3
# Share of the seconds of a measurement for each size.
SHARE = 0.1


def measure(run: Run) -> None:
    """Measure eager execution and graphs in turn, then the compiler."""
    hidden, layers = run.pick(768, 64), run.pick(6, 2)
    shape = f"{layers} layers of {hidden}, {run.dtype}, {TOKENS} tokens"
    run.title(TABLE, f"Milliseconds of a batch of n: encoder, {shape}")
    network = make_encoder(run.device, run.dtype, hidden, layers)
    torch.manual_seed(SEED)
    batches = {size: torch.randint(1, VOCABULARY, (size, TOKENS)).to(run.device) for size in SIZES}
    with torch.no_grad():
        _measure_launched(run, network, batches)
        if run.is_gpu:
            try:
                _measure_compiled(run, network, batches)
            except Exception as error:  # noqa: BLE001  a compiler or its tools may be missing
                run.note(f"times: torch.compile failed: {error!s:.300}")


def _measure_launched(run: Run, network: Encoder, batches: dict[int, torch.Tensor]) -> None:
    cells: list[tuple[int, str, Callable[[], object]]] = []
    for size, batch in batches.items():
        cells.append((size, "eager", partial(network, batch)))
        if run.is_gpu:
            cells.append((size, "graph", capture(network, batch).replay))
    for repetition, (size, way, compute) in run.take_turns(cells):
        run.tell(TABLE, f"n = {size}", repetition, {way: _time(run, compute)})


def _measure_compiled(run: Run, network: Encoder, batches: dict[int, torch.Tensor]) -> None:
    compiled: Any = torch.compile(network, mode="reduce-overhead", dynamic=False)
    start = time.perf_counter()
    for size in COMPILED_SIZES:
        if time.perf_counter() - start > COMPILING_LIMIT:
            run.note(f"times: no time was left to compile n = {size} and later sizes")
            return

        def compute(size: int = size) -> None:
            # PyTorch does not type it.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            compiled(batches[size])

        begin = time.perf_counter()
        _time(run, compute)
        run.note(f"times: n = {size} was compiled in {time.perf_counter() - begin:.1f} s")
        for repetition in range(run.repetitions):
            run.tell(TABLE, f"n = {size}", repetition, {"compiled": _time(run, compute)})


def capture(network: Encoder, batch: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Capture the network on a batch, whose memory the graph reads at each replay."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # PyTorch does not type it
    side.wait_stream(torch.cuda.current_stream())
    # Kernels and workspaces are set up outside of the capture, on a stream that is not the default.
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_BATCHES):
            network(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        network(batch)
    return graph


def _time(run: Run, compute: Callable[[], object]) -> float:
    """Return the median milliseconds from a launch to the end of its last kernel."""
    for _ in range(WARM_UP_BATCHES):
        compute()
    _synchronize(run)
    taken: list[float] = []
    end = time.perf_counter() + SHARE * run.seconds
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        compute()
        _synchronize(run)
        taken.append(time.perf_counter() - start)
    return 1e3 * median(taken)


def _synchronize(run: Run) -> None:
    if run.is_gpu:
        torch.cuda.synchronize()
