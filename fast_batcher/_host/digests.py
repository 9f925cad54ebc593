"""Digests of model arguments, equal in every process that has equal arguments.

A pickle is not: the order of a set follows the hash seed of its process, the memo tells which parts
are one object, and a tensor carries the key of its storage. API process, any thread.
"""

import copyreg
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

# Types whose `repr` is unambiguous.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...))


def digest(*parts: Any) -> str:
    """Return the digest of values, in hexadecimal digits.

    Sets and dicts are equal whatever the order of their items; an `OrderedDict` is not. Any other
    object is described by what `pickle` would store of it.

    Raises:
        Exception: Any exception of pickling a value.
    """
    return _Digester().digest(parts).hex()


class _Digester:
    """Digests of the values of one call."""

    def __init__(self) -> None:
        # The digests of containers, which may be part of several others, by id; and the containers,
        # so that no other object gets their ids.
        self._known: dict[int, bytes] = {}
        self._kept: list[Any] = []
        # The containers around the present value, by id, with their depth.
        self._around: dict[int, int] = {}

    def digest(self, value: Any) -> bytes:
        kind = type(value)
        if kind in _ATOMS:
            return _join(kind.__name__.encode(), repr(value).encode())
        if isinstance(value, type | FunctionType) or _is_builtin_function(value):
            return _join(b"name", f"{value.__module__}.{value.__qualname__}".encode())
        at = id(value)
        if at in self._around:  # a cycle
            return _join(b"around", str(self._around[at]).encode())
        if at not in self._known:
            self._around[at] = len(self._around)
            self._known[at] = self._digest_parts(value, kind)
            self._kept.append(value)
            del self._around[at]
        return self._known[at]

    def _digest_parts(self, value: Any, kind: type) -> bytes:
        if kind is list or kind is tuple:
            return self._hash_all(kind.__name__, value)
        if kind is set or kind is frozenset:
            return _join(kind.__name__.encode(), *sorted(map(self.digest, value)))
        if kind is dict:
            return self._digest_items(value.items())
        buffer = _read_buffer(value)
        if buffer is not None:
            return _join(self.digest(kind), *buffer)
        reducer = copyreg.dispatch_table.get(kind)
        # With protocol 5 an array would return a buffer, which this does not describe.
        reduced: Any = value.__reduce_ex__(4) if reducer is None else reducer(value)
        if isinstance(reduced, str):
            return self._hash_all("global", (kind, reduced))
        made, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        if pairs is None:
            of_dict = b""
        elif isinstance(value, OrderedDict):
            of_dict = self._hash_all("ordered", map(tuple, pairs))
        else:
            of_dict = self._digest_items(pairs)
        parts = (made, arguments, state, None if items is None else [*items])
        return _join(self._hash_all("object", parts), of_dict)

    def _digest_items(self, items: Iterable[tuple[Any, Any]]) -> bytes:
        pairs = sorted((self.digest(key), self.digest(value)) for key, value in items)
        return _join(b"dict", *[part for pair in pairs for part in pair])

    def _hash_all(self, kind: str, values: Iterable[Any]) -> bytes:
        return _join(kind.encode(), *map(self.digest, values))


def _is_builtin_function(value: Any) -> bool:
    """Return whether a value is a built-in function, and no method of an object or class."""
    owner = value.__self__ if isinstance(value, BuiltinFunctionType) else value
    return owner is None or isinstance(owner, ModuleType)


def _read_buffer(value: Any) -> tuple[bytes, bytes] | None:
    """Return dtype, shape and device of an array or tensor, and its bytes; None if it has none."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    # A subclass may have more than its bytes, as a masked array has.
    if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
        array = numpy.lib.format.dtype_to_descr(value.dtype), value.shape
        return repr(array).encode(), value.tobytes()
    if torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
        if value.is_quantized:
            return None
        tensor = str(value.dtype), (*value.shape,), str(value.device), value.requires_grad
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        # `contiguous` leaves any stride to a single number.
        plain = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
        return repr(tensor).encode(), plain.view(torch.uint8).numpy().tobytes()
    return None


def _join(*parts: bytes) -> bytes:
    """Return the digest of byte strings, each behind its length."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8))
        found.update(part)
    return found.digest()
