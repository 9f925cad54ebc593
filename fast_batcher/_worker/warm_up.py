"""The warm-up: compute the model's own examples before the first request. Worker process.

When the worker reports that it is ready, kernels are loaded and caches are filled, and the parent
gets the times of a batch of one and of a full batch.
"""

import logging
from itertools import cycle, islice
from time import monotonic
from typing import Any

from fast_batcher._arrays.joining import list_outputs
from fast_batcher._transport import pickling
from fast_batcher._worker.out_of_memory import free_memory
from fast_batcher.errors import (
    CollationError,
    OutputMismatchError,
    WorkerStartupError,
    is_kind,
    is_out_of_memory,
)

logger = logging.getLogger("fast_batcher.worker")


def warm_up(model: Any, max_batch_size: int) -> list[tuple[int, float]]:
    """Compute a batch of one and full batches of the model's `warmup_inputs`, and time them.

    The full batches hold all the inputs, repeated from the first on until the last batch is full.
    Each of the two sizes is then computed once more, and this second time counts. A worker that
    runs out of memory with a full batch starts nevertheless: the scheduler makes batches smaller
    when requests run out of memory, too.

    Args:
        model: The model; `warmup_inputs` is optional, and may return an empty list.
        max_batch_size: Inputs of a full batch.

    Returns:
        Sizes and seconds; empty without inputs.

    Raises:
        WorkerStartupError: The model raised, or did not return one output per input.
    """
    try:
        return _compute_all(model, max_batch_size)
    except Exception as error:
        raise WorkerStartupError(
            f"during warm-up with what warmup_inputs() returned: {pickling.one_line(error)}"
        ) from error


def _compute_all(model: Any, max_batch_size: int) -> list[tuple[int, float]]:
    warmup_inputs = getattr(model, "warmup_inputs", None)
    inputs = list(warmup_inputs()) if warmup_inputs is not None else []
    if not inputs:
        return []
    _time_batch(model, inputs[:1])
    times = [(1, _time_batch(model, inputs[:1]))]
    if max_batch_size == 1:
        for one in inputs[1:]:
            _time_batch(model, [one])
        return times
    batches = -(-len(inputs) // max_batch_size)
    repeated = list(islice(cycle(inputs), batches * max_batch_size))
    try:
        for start in range(0, len(repeated), max_batch_size):
            _time_batch(model, repeated[start : start + max_batch_size])
        times.append((max_batch_size, _time_batch(model, repeated[:max_batch_size])))
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error)
        logger.warning("the warm-up ran out of memory with %d inputs: %s", max_batch_size, error)
    return times


def _time_batch(model: Any, inputs: list[Any]) -> float:
    """Compute a batch, check its outputs, and return the seconds that `infer` took."""
    count = len(inputs)
    batch = [_copy_input(one) for one in inputs]
    started = monotonic()
    outputs = model.infer(batch)
    seconds = monotonic() - started
    for output in list_outputs(outputs, count, "infer returned", copies=False):
        # There is no request yet, so the cause is the declaration or the model.
        if is_kind(output, CollationError) or is_kind(output, OutputMismatchError):
            raise output
    return seconds


def _copy_input(value: Any) -> Any:
    """Copy an input, as sending it does: `infer` may change its inputs, or consume them."""
    try:
        return pickling.loads(pickling.dumps(value))
    except Exception:  # noqa: BLE001  an example that cannot be sent will do
        return value
