"""Identities: digests that are equal in every process, and what tells models apart.

Any process and thread.

A pickle is not equal in every process: the order of a set follows the hash seed, the memo tells
which parts are one object, and a tensor carries the key of its storage.

The *identity* of a model is a digest of its class, the code of the class's module, the arguments,
the states of the files that these name, and `shared_version`. It is part of all keys of cached
outputs. A model that no other process can find by these, a class of a notebook for example, has a
*mark* in its identity: a random part that no other batcher has. The key of a host has the same
parts, except the files: a host knows which files its workers have loaded.
"""

import copyreg
import hashlib
import inspect
import os
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from itertools import accumulate, chain
from pathlib import Path
from secrets import token_hex
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from fast_batcher._arrays.libraries import LIBRARIES, find_array_type
from fast_batcher._file_state import read_state
from fast_batcher.model import ModelSpec

# Bytes of a digest: among 2**40 inputs two have the same one with a probability of 2**-81.
DIGEST_SIZE = 20
# Texts that are looked for on the disk, on an event loop, at 2 us each: a vocabulary has more.
MOST_PATHS = 1000

# Types whose `repr` is unambiguous.
_ATOMS = (type(None), bool, int, float, complex, type(...))
_CONTAINERS = (list, tuple, dict)


def digest(*parts: Any) -> str:
    """Return the digest of values, in hexadecimal digits.

    Sets and dicts are equal whatever the order of their items; an `OrderedDict` is not. Any other
    object is described by what `pickle` would store of it.

    Raises:
        Exception: Any exception of pickling a value.
    """
    return _join(_Digester().digest(parts))[1:].hex()


def digest_input(value: Any) -> str:
    """Return the digest of an input, in which dicts with another order differ.

    Raises:
        Exception: Any exception of pickling the value.
    """
    return _join(_Digester(of_input=True).digest(value))[1:].hex()


class _Digester:
    """Digests of the values of one call."""

    def __init__(self, *, of_input: bool = False) -> None:
        # Whether the order of the items of a dict counts, and not whether a tensor has gradients.
        self._of_input = of_input
        # The digests of containers, which may be part of several others, by id; and the containers,
        # so that no other object gets their ids.
        self._known: dict[int, bytes] = {}
        self._kept: list[Any] = []
        # The containers around the present value, by id, with their depth.
        self._around: dict[int, int] = {}

    def digest(self, value: Any) -> bytes:
        kind = type(value)
        if kind is str:
            return _shorten(b"str ", value.encode("utf-8", "surrogatepass"))
        if kind is bytes:
            return _shorten(b"bytes ", value)
        if kind in _ATOMS:
            return _shorten(b"%b " % kind.__name__.encode(), repr(value).encode())
        at = id(value)
        if at in self._around:  # a cycle
            return b"around %d" % self._around[at]
        if at not in self._known:
            self._around[at] = len(self._around)
            self._known[at] = self._digest_parts(value, kind)
            self._kept.append(value)
            del self._around[at]
        return self._known[at]

    def _digest_parts(self, value: Any, kind: type) -> bytes:
        if isinstance(value, type | FunctionType) or _is_builtin_function(value):
            pickle.dumps(value)  # raises if no other process finds it by its name
            return _join(b"name", f"{value.__module__}.{value.__qualname__}".encode())
        if kind in _CONTAINERS:
            plain = _digest_plain(value) if self._of_input else None
            if plain is not None:
                return _join(b"plain", plain)
            if kind is dict:
                return self._digest_items(value.items())
            return self._hash_all(kind.__name__, value)
        if kind is set or kind is frozenset:
            return _join(kind.__name__.encode(), *sorted(map(self.digest, value)))
        buffer = _read_buffer(value, of_input=self._of_input)
        if buffer is not None:
            return _join(self.digest(kind), *buffer)
        return self._digest_object(value, kind)

    def _digest_object(self, value: Any, kind: type) -> bytes:
        reducer = copyreg.dispatch_table.get(kind)
        # Protocol 5 would make an array return a buffer, which this does not describe.
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
        elements: Any = None if items is None else [*items]
        if isinstance(value, set | frozenset):  # of a class of the user's: its elements are a list
            arguments, elements = (kind,), {*value}
        return _join(
            self._hash_all("object", (made, *arguments)),
            # It is rarely plain, and its parts often are.
            self._digest_items(state.items()) if type(state) is dict else self.digest(state),
            self.digest(elements),
            of_dict,
        )

    def _digest_items(self, items: Iterable[tuple[Any, Any]]) -> bytes:
        if self._of_input:
            return self._hash_all("dict", chain.from_iterable(items))
        pairs = sorted((self.digest(key), self.digest(value)) for key, value in items)
        return _join(b"dict", *[part for pair in pairs for part in pair])

    def _hash_all(self, kind: str, values: Iterable[Any]) -> bytes:
        return _join(kind.encode(), *map(self.digest, values))


class _NotPlainError(Exception):
    """A value has other parts than lists, tuples, dicts, texts and numbers."""


class _PlainPickler(pickle.Pickler):
    """A pickler of lists, tuples, dicts, texts and numbers alone: ten times as fast as a digest."""

    def reducer_override(self, value: Any) -> Any:
        raise _NotPlainError


class _HashingFile:
    """File-like target of a pickler that keeps a digest of the stream alone."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=DIGEST_SIZE)
        self.write = self.hash.update


def _digest_plain(value: Any) -> bytes | None:
    """Return the digest of a container of plain values, None if it has others."""
    file = _HashingFile()
    # Protocol 3 reduces a set like an object, so that `reducer_override` sees it.
    pickler = _PlainPickler(file, 3)
    # With a memo the pickle of ["a", "a"] would depend on whether these are one object.
    pickler.fast = True
    try:
        pickler.dump(value)
    except (_NotPlainError, ValueError):  # a cycle is a ValueError
        return None
    return file.hash.digest()


def _is_builtin_function(value: Any) -> bool:
    """Return whether a value is a built-in function, and no method of an object or class."""
    owner = value.__self__ if isinstance(value, BuiltinFunctionType) else value
    return owner is None or isinstance(owner, ModuleType)


def _read_buffer(value: Any, *, of_input: bool) -> tuple[bytes, bytes] | None:
    """Return dtype, shape and device of an array or tensor, and its bytes; None if it has none."""
    for library in LIBRARIES:
        kind = find_array_type(library)
        if kind is not None and isinstance(value, kind):
            return library.read(value, of_input)
    return None


def _shorten(kind: bytes, data: bytes) -> bytes:
    """Return bytes that stand for an atom: itself if it is short, because a hash takes 2 us."""
    return kind + data if len(data) <= 2 * DIGEST_SIZE else _join(kind, data)


def _join(*parts: bytes) -> bytes:
    """Return the digest of byte strings, each behind its length; no atom begins as a digest."""
    framed = b"".join([piece for part in parts for piece in (len(part).to_bytes(8), part)])
    return b"#" + hashlib.blake2b(framed, digest_size=DIGEST_SIZE).digest()


def describe_model(spec: ModelSpec) -> dict[str, str]:
    """Digest the model and each of its arguments, by their names in messages."""
    model, args, kwargs = spec.model, *_read_arguments(spec)
    named = model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
    own = {"the model": named}
    own |= {f"model_args[{at}]": value for at, value in enumerate(args)}
    own |= {f"model_kwargs[{name!r}]": value for name, value in kwargs.items()}
    return {name: digest(value) for name, value in own.items()}


def _read_arguments(spec: ModelSpec) -> tuple[Any, Any]:
    """Return the arguments that the workers get: the user may have changed those of the call."""
    if not spec.pickled:
        return spec.read_arguments()
    _, args, kwargs = pickle.loads(spec.pickled)
    return args, kwargs


def identify_model(spec: ModelSpec, version: str | None) -> ModelSpec:
    """Return a model with its present identity, which keeps its mark.

    Call it before the workers load the model: outputs of new files may then have the identity of
    old ones, never the reverse.
    """
    _, _, mark = spec.identity.partition("-")
    code = _read_code(spec.module)
    parts: tuple[Any, ...] = (spec.module, code, version)
    try:
        paths = list_paths(_read_arguments(spec))
        states = {path: state for path in paths if (state := read_state(path)) is not None}
        if isinstance(spec.model, type):
            digest(spec.model)
        parts = *parts, describe_model(spec), states
    except Exception:  # noqa: BLE001  threads take arguments and classes that cannot be pickled
        code = version = None
    if code is None and version is None:
        mark = mark or token_hex(8)
    return replace(spec, identity=f"{digest(parts)}-{mark}" if mark else digest(parts))


def identify_reloaded(spec: ModelSpec, present: ModelSpec, version: str | None) -> ModelSpec:
    """Return a model with another identity than the one that it replaces.

    With equal arguments and files something has changed that has no name here: the identity gets
    a mark, which all later models of the batcher keep.
    """
    spec = identify_model(replace(spec, identity=present.identity), version)
    if spec.identity == present.identity:
        spec = identify_model(replace(spec, identity=f"-{token_hex(8)}"), version)
    return spec


def identify_function(call: Any, instance: object = None) -> str:
    """Return the identity of a decorated function, or of a method of an instance or a class.

    What an instance or a closure has is not known, so that its identity is random.
    """
    module, name = getattr(call, "__module__", None), getattr(call, "__qualname__", "<unknown>")
    code = None if module is None else _read_code(module)
    is_known = "<" not in name and (instance is None or inspect.isclass(instance))
    if code is None or not is_known:
        return token_hex(DIGEST_SIZE)
    owner = getattr(instance, "__module__", None), getattr(instance, "__qualname__", None)
    # Functions of one module may have one name.
    line = getattr(getattr(call, "__code__", None), "co_firstlineno", None)
    return digest(module, name, line, code, owner)


def _read_code(module: str) -> bytes | None:
    """Return the contents of a module's file, None if they cannot be read.

    Its time would differ after each deployment.
    """
    file = find_module_file(module)
    with suppress(OSError, ValueError):
        return None if file is None else Path(file).read_bytes()
    return None


def find_module_file(module: str) -> str | None:
    """Return the file of a module without importing it; None if it has none.

    Another process may have imported the module, and must find the same file.
    """
    if module == "__main__":
        return getattr(sys.modules[module], "__file__", None)
    found, path = None, None
    for name in accumulate(module.split("."), "{}.{}".format):
        found = PathFinder.find_spec(name, path)
        path = None if found is None else found.submodule_search_locations
        if path is None:  # not a package
            break
    if found is not None and found.name == module and found.origin is not None:
        return found.origin
    # Import hooks may find modules elsewhere.
    return getattr(sys.modules.get(module), "__file__", None)


def list_paths(arguments: Any) -> list[str]:
    """Return the texts and paths in arguments and in the containers among these, `MOST_PATHS`."""
    found: dict[str, None] = {}
    # Breadth-first: a vocabulary does not hide the arguments behind it. A container may be inside
    # itself.
    left, seen = deque([arguments]), {id(arguments)}
    while left and len(found) < MOST_PATHS:
        value = left.popleft()
        if isinstance(value, str | os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str):
                found[path] = None
        elif isinstance(value, dict | list | tuple | set | frozenset):
            parts = value.values() if isinstance(value, dict) else value
            new = {id(part): part for part in parts if id(part) not in seen}
            seen.update(new)
            left.extend(new.values())
    return [*found]
