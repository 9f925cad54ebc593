"""The warm-up: compute the model's own examples before the first request. Worker process.

It has two purposes: kernels are loaded and caches filled when the worker is called ready, and the
parent learns how long a batch of one and a full batch take, before it has to decide anything.
"""

import logging
from itertools import cycle, islice
from time import monotonic
from typing import Any

from fast_batcher._transport import codec
from fast_batcher._worker.out_of_memory import free_memory
from fast_batcher.errors import CollationError, OutputMismatchError, is_out_of_memory

logger = logging.getLogger("fast_batcher.worker")


def warm_up(model: Any, max_batch_size: int) -> list[tuple[int, float]]:
    """Compute a batch of one and full batches of the model's `warmup_inputs`, and time them.

    The full batches hold all the inputs, repeated from the first on until the last batch is full.
    Each of the two sizes is then computed once more, and it is this second time that counts. That
    memory does not suffice for a full batch is no reason not to start: batches will become smaller
    when requests run out of it too.

    Args:
        model: Maybe without `warmup_inputs`, or without any of them.
        max_batch_size: What is full.

    Returns:
        Sizes and seconds; none without inputs.

    Raises:
        OutputMismatchError: The model returned something other than one output per input.
        CollationError: The inputs cannot be joined.
        Exception: What the model raises.
    """
    warmup_inputs = getattr(model, "warmup_inputs", None)
    inputs = list(warmup_inputs()) if warmup_inputs is not None else []
    if not inputs:
        return []
    _compute(model, inputs[:1])
    times = [(1, _compute(model, inputs[:1]))]
    if max_batch_size == 1:
        for one in inputs[1:]:
            _compute(model, [one])
        return times
    batches = -(-len(inputs) // max_batch_size)
    repeated = list(islice(cycle(inputs), batches * max_batch_size))
    try:
        for start in range(0, len(repeated), max_batch_size):
            _compute(model, repeated[start : start + max_batch_size])
        times.append((max_batch_size, _compute(model, repeated[:max_batch_size])))
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error)
        logger.warning("the warm-up ran out of memory with %d inputs: %s", max_batch_size, error)
    return times


def _compute(model: Any, inputs: list[Any]) -> float:
    count = len(inputs)
    batch = [_copy(one) for one in inputs]
    started = monotonic()
    outputs = model.infer(batch)
    seconds = monotonic() - started
    checked = codec.check_outputs(outputs, count)
    if isinstance(checked, str):
        raise OutputMismatchError(f"during warm-up: {checked}")
    for output in checked:
        # No request is to blame, so it is the declaration or the model.
        if isinstance(output, CollationError | OutputMismatchError):
            raise output
    return seconds


def _copy(one: Any) -> Any:
    """As a request would bring it: `infer` may change its inputs, or read them up."""
    try:
        return codec.loads(codec.dumps(one))
    except Exception:  # noqa: BLE001  it need not be one that can be sent
        return one
