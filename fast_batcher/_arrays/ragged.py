"""Arrays of unequal lengths, joined one behind the other along their first axis. Pure.

NumPy and PyTorch are used where they are loaded. `joining` decides which arrays are joined.
"""

import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from fast_batcher._arrays.trees import flatten


def count_positions(value: Any) -> int:
    """Return the length of the first array of an input, at least 1; the cost of the input."""
    leaves, _ = flatten(value)
    shapes = (getattr(leaf, "shape", ()) for leaf in leaves)
    return max(1, next((shape[0] for shape in shapes if shape), 1))


def concatenate(leaves: Sequence[Any], *, are_tensors: bool) -> Any:
    """Join arrays of one dtype, which is kept, or tensors along their first axis."""
    if are_tensors:
        return sys.modules["torch"].cat(leaves)
    first, numpy = leaves[0], sys.modules["numpy"]
    total = sum([len(leaf) for leaf in leaves])
    # Without `out` the byte order of the dtype would be lost.
    return numpy.concatenate(leaves, out=numpy.empty((total, *first.shape[1:]), first.dtype))


def make_offsets(lengths: Sequence[int], like: Any, *, are_tensors: bool) -> Any:
    """Return the starts of the parts, and the end of the last one, beside the array `like`."""
    offsets = [0, *accumulate(lengths)]
    if are_tensors:
        torch = sys.modules["torch"]
        return torch.tensor(offsets, dtype=torch.int32, device=like.device)
    return sys.modules["numpy"].array(offsets, "int32")


def split_at(batch: Any, lengths: Sequence[int]) -> list[Any]:
    """Return views of the parts of an array or tensor."""
    return [batch[start:end] for start, end in pairwise([0, *accumulate(lengths)])]


def double(leaf: Any, *, are_tensors: bool) -> Any:
    """Return an array with the first element of another one twice."""
    return concatenate([leaf[:1], leaf[:1]], are_tensors=are_tensors)
