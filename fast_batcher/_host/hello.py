"""Introduction of an API process to its host: settings, model and key. API process, any thread."""

import logging
import os
import sys
import warnings
from collections import deque
from dataclasses import fields
from typing import Any

from fast_batcher._host.digests import digest
from fast_batcher._host.identity import HostKey, find_module_file, make_key
from fast_batcher._host.protocol import Hello
from fast_batcher._transport.pickling import dumps, loads
from fast_batcher.errors import ConfigurationError
from fast_batcher.model import ModelSpec
from fast_batcher.settings import Reconfiguration, Settings

# Texts that the host looks for on the disk, on its event loop, at 2 us each: a vocabulary has more.
MOST_PATHS = 1000

# Settings that mean nothing to a host, or are no plain values.
NOT_OF_HOST = frozenset(
    {
        *("cost", "group_by", "observers", "auto_open", "name", "cache", "key"),
        *("shared", "shared_version"),
    }
)


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that a host needs."""
    names = [field.name for field in fields(settings) if field.name not in NOT_OF_HOST]
    return {name: getattr(settings, name) for name in names}


def pack_changes(settings: Settings) -> bytes:
    """Pickle the settings that `reconfigure` may have changed."""
    return dumps({name: getattr(settings, name) for name in Reconfiguration.__annotations__})


def find_key(model_spec: ModelSpec, settings: Settings, name: str) -> HostKey:
    """Make the key of the host for a batcher of this process.

    Raises:
        ConfigurationError: The host's workers cannot import the model.
    """
    module = model_spec.module
    if module == "__main__":
        raise ConfigurationError(
            f"shared={settings.shared!r}: {model_spec.name} is defined in the program that is run, "
            "which the workers of another process cannot import; put it into a module of its own"
        )
    own = _digest_settings(settings) | _digest_model(model_spec)
    return make_key(settings.shared, own, find_module_file(module), name)


def _digest_settings(settings: Settings) -> dict[str, str]:
    """Digest each setting, by its name in messages; a function by whether there is one."""
    own = plain_settings(settings)
    own |= {name: getattr(settings, name) is not None for name in ("cost", "group_by")}
    own["shared_version"] = settings.shared_version
    return {name: digest(value) for name, value in own.items()}


def _digest_model(model_spec: ModelSpec) -> dict[str, str]:
    """Digest the model and each of its arguments, by their names in messages."""
    # Unpickled here, because only a shared batcher needs the digests of its arguments.
    model, args, kwargs = loads(model_spec.pickled)
    named = model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
    own = {"the model": named}
    own |= {f"model_args[{at}]": value for at, value in enumerate(args)}
    own |= {f"model_kwargs[{name!r}]": value for name, value in kwargs.items()}
    return {name: digest(value) for name, value in own.items()}


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


def make_hello(model_spec: ModelSpec, settings: Settings, key: HostKey, *, observes: bool) -> Hello:
    """Make the first frame of an API process.

    Args:
        model_spec: The model.
        settings: The batcher's settings.
        key: The key of the host.
        observes: Whether events are wanted.
    """
    return Hello(
        settings=plain_settings(settings),
        has_costs=settings.cost is not None,
        has_groups=settings.group_by is not None,
        name=key.name,
        model_name=model_spec.name,
        model=model_spec.pickled,
        named_paths=list_paths(loads(model_spec.pickled)[1:]),
        sys_path=list(sys.path),
        root_level=logging.getLogger().level,
        library_level=logging.getLogger("fast_batcher").getEffectiveLevel(),
        captures_warnings=warnings.showwarning.__module__ == "logging",
        observes=observes,
        supervisor=key.supervisor,
    )
