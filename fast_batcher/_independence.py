"""Independence of the batch: whether an output depends on the other inputs of its batch.

A model is wrong if it does, and batching exposes it: the attention mask is not passed, padding is
averaged in, batch normalisation is in training mode. Runs on the caller's event loop, and compares
what a batcher answers.
"""

import json
import math
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fast_batcher._arrays.kinds import is_array, to_numpy
from fast_batcher._arrays.trees import flatten

# Inputs of the check: their pairs take a few batches each.
MOST_INPUTS = 8
# Largest change of an output, as a share of its largest number, by the letter of NumPy's kind and
# the bytes of the dtype. Kernels for batches of other sizes add in another order: an embedding of
# MiniLM was seen to change by 0.0015, and an ignored mask changes more than a hundredth. Numbers of
# Python may come from float32.
TOLERANCES = {("f", 2): 0.05, ("f", 4): 0.01, ("f", 8): 0.01, ("c", 8): 0.01, ("c", 16): 0.01}
# The largest number counts as at least this: of sums that cancel only rounding is left.
SMALLEST = 1e-5
# Copies of an input in one batch: more than the smallest kernels take at a time.
COPIES = 5

AT_RANDOM = "from batch to batch"
# The usual cause of a change.
CAUSES = {
    AT_RANDOM: "is a random layer active, such as dropout? Call eval()",
    "beside copies of it": "does infer mix up its inputs, or keep something between them?",
    "beside another of its size": "does it use statistics of the batch, as batch normalisation in "
    "training mode does? Call eval()",
    "beside a longer one": "is the attention mask passed, and is padding left out of means?",
}

Compute = Callable[[list[Any]], Awaitable[list[Any]]]


async def find_dependence(compute: Compute, inputs: Sequence[Any]) -> str | None:
    """Compare the output for an input alone, beside copies, one of its size, and the longest.

    Args:
        compute: Computes inputs as one batch; returns the outputs in their order.
        inputs: One or more inputs; the first `MOST_INPUTS` are compared.

    Returns:
        What changes, and its usual cause; None if nothing does.
    """
    inputs = inputs[:MOST_INPUTS]
    longest = max(inputs, key=measure_length)
    for value in inputs:
        length = measure_length(value)
        same = [one for one in inputs if one is not value and measure_length(one) == length]
        mates: dict[str, list[Any] | None] = {
            AT_RANDOM: [],
            "beside copies of it": [value] * (COPIES - 1),
            "beside another of its size": same[:1] or None,
            "beside a longer one": [longest] if measure_length(longest) > length else None,
        }
        (alone,) = await compute([value])
        for where, beside in mates.items():
            if beside is None:
                continue
            change = find_change(alone, (await compute([value, *beside]))[0])
            if change > 0:
                size = "" if change == math.inf else f" by {change:.2g} of its largest number"
                return f"the output for an input changes{size} {where}: {CAUSES[where]}"
    return None


def measure_length(value: Any) -> int:
    """Return how long an input is: the characters, items or numbers of its leaves."""
    leaves, _ = flatten(value)
    return sum(_length_of(leaf) for leaf in leaves)


def _length_of(leaf: Any) -> int:
    array = to_numpy(leaf)
    if is_array(array):
        return int(array.size)
    return len(leaf) if isinstance(leaf, str | bytes) else 1


def find_change(one: Any, other: Any) -> float:
    """Return the largest change between two outputs beyond the tolerance of their dtype.

    Returns:
        Of numbers a share of the largest one; infinity for other values; 0 without a change.
    """
    (leaves, tree), (others, other_tree) = flatten(_decode_json(one)), flatten(_decode_json(other))
    if tree != other_tree:
        return math.inf
    return max(map(_compare, leaves, others), default=0.0)


def _decode_json(output: Any) -> Any:
    """Return what an output says that is written as JSON; another output as it is."""
    try:
        return json.loads(output) if isinstance(output, str | bytes) else output
    except ValueError:
        return output


def _compare(one: Any, other: Any) -> float:
    numbers = _to_numbers(one), _to_numbers(other)
    if None in numbers:
        return 0.0 if _is_equal(one, other) else math.inf
    (values, tolerance), (others, _) = numbers  # type: ignore[misc]  # neither is None
    if len(values) != len(others):
        return math.inf
    largest = max([SMALLEST, *(abs(value) for value in values if value == value)])
    try:
        changes = [
            abs(value - changed) / largest
            for value, changed in zip(values, others, strict=True)
            # Two that are no number are equal, and so are infinite ones.
            if value != changed and (value == value or changed == changed)
        ]
    except OverflowError:  # one of two different values is a whole number that no float holds
        return math.inf
    if any(change != change for change in changes):  # one of the two is no number
        return math.inf
    change = max(changes, default=0.0)
    return change if change > tolerance else 0.0


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; arrays of other values than numbers are, too."""
    if is_array(one) and is_array(other):
        return bool(one.dtype == other.dtype and _is_equal(one.tolist(), other.tolist()))
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001  as arrays inside of a list
        return pickle.dumps(one) == pickle.dumps(other)


def _to_numbers(leaf: Any) -> tuple[list[Any], float] | None:
    """Return the numbers of a leaf, and their tolerance; None for another value."""
    if isinstance(leaf, bool | str | bytes):
        return None
    array = to_numpy(leaf)
    if hasattr(array, "dtype") and hasattr(array, "reshape"):
        if array.dtype.kind not in "biufc":
            return None
        # The array of a bfloat16 tensor has wider numbers.
        precision = array.dtype.kind, leaf.dtype.itemsize
        return array.reshape(-1).tolist(), TOLERANCES.get(precision, 0.0)
    if isinstance(leaf, float | complex):
        return [leaf], TOLERANCES["f", 8]
    return ([leaf], 0.0) if isinstance(leaf, int) else None
