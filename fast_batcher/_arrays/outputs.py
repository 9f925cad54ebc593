"""Conversion of a model's outputs for a batch to a list with one output per input. Pure."""

import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from fast_batcher._arrays.leaves import copy_rows
from fast_batcher._arrays.tables import TABLE_FAULT, TEXTS, has_field_names, is_table
from fast_batcher.errors import OutputMismatchError

_NO_SEQUENCE: Final = (
    "; return a list with one output per input, or an array whose first axis is the batch"
)


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
        OutputMismatchError: The outputs are no sequence, or a table or a tuple with field names; or
            their number, counted by iteration, is not `count`: an output could reach the wrong
            caller.
    """
    # A subclass of list may iterate over something else than its items.
    if type(outputs) is list and len(outputs) == count:
        return outputs
    fault = _describe_fault(outputs)
    if fault is not None:
        raise OutputMismatchError(f"{returned} {type(outputs).__name__} for {count} inputs{fault}")
    if len(outputs) != count:
        raise OutputMismatchError(
            f"{returned} {len(outputs)} outputs for {count} inputs; return one per input"
        )
    rows = _list_rows(outputs, count, copies=copies, to_cpu=to_cpu)
    if len(rows) != count:
        found = "more" if len(rows) > count else len(rows)
        raise OutputMismatchError(
            f"{returned} {type(outputs).__name__} for {count} inputs: its length is {count}, and "
            f"iteration gives {found}; return a list with one output per input"
        )
    return rows


def _describe_fault(outputs: Any) -> str | None:
    """Describe why a value cannot be one output per input, and the remedy; None if it can."""
    if _is_array(outputs) or _is_tensor(outputs):
        # An array without axes has a shape, and no length.
        return None if outputs.shape else _NO_SEQUENCE
    if is_table(outputs):
        return TABLE_FAULT
    if has_field_names(outputs):
        return (
            ": its entries are the fields of one value; return a list with one output per input, "
            "as list(zip(values, indices)) of two fields"
        )
    is_array_like = bool(getattr(outputs, "shape", ())) and hasattr(outputs, "__getitem__")
    is_sequence = is_array_like or isinstance(outputs, Sequence)
    return None if is_sequence and not isinstance(outputs, TEXTS) else _NO_SEQUENCE


def _list_rows(outputs: Any, count: int, *, copies: bool, to_cpu: bool) -> list[Any]:
    """List the outputs; of one that has more than `count`, one more than that."""
    if _is_tensor(outputs):
        return [row.clone() for row in (outputs.detach().cpu() if to_cpu else outputs)]
    if copies and _is_array(outputs):
        return copy_rows(outputs)
    return list(islice(outputs, count + 1))


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
