"""Conversion of a model's outputs for a batch to a list with one output per input. Pure."""

import sys
from collections.abc import Sequence
from typing import Any

from fast_batcher._arrays.leaves import copy_rows
from fast_batcher.errors import OutputMismatchError


def list_outputs(
    outputs: Any, count: int, returned: str, *, copies: bool, to_cpu: bool = True
) -> list[Any]:
    """Return the outputs of a batch as a list: an array or tensor is split along its first axis.

    Args:
        outputs: The model's return value.
        count: Number of inputs.
        returned: Subject and verb for error messages, as "infer returned".
        copies: Whether the rows of an array are copied. A view keeps the whole batch in memory, and
            changes when the model fills the array again, or when another caller writes into a row
            that shares its memory. The rows of tensors are always copied: a view would be pickled
            with the whole batch.
        to_cpu: Whether the rows of a tensor are detached and moved to the CPU: another process gets
            them.

    Raises:
        OutputMismatchError: The outputs are no sequence, or their number is not `count`: an output
            could reach the wrong caller.
    """
    if isinstance(outputs, list) and len(outputs) == count:
        return outputs
    # An array without axes has a shape, and no length.
    is_array = bool(getattr(outputs, "shape", ())) and hasattr(outputs, "__getitem__")
    is_text = isinstance(outputs, str | bytes | bytearray | memoryview)
    if is_text or not (is_array or isinstance(outputs, Sequence)):
        raise OutputMismatchError(
            f"{returned} {type(outputs).__name__} for {count} inputs; return a list with one "
            "output per input, or an array whose first axis is the batch"
        )
    if len(outputs) != count:
        raise OutputMismatchError(
            f"{returned} {len(outputs)} outputs for {count} inputs; return one per input"
        )
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(outputs, torch.Tensor):
        return [row.clone() for row in (outputs.detach().cpu() if to_cpu else outputs)]
    if copies and numpy is not None and isinstance(outputs, numpy.ndarray):
        return copy_rows(outputs)
    return list(outputs)
