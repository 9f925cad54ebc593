"""Introduction of an API process to its host: settings, model and key. API process, any thread."""

import logging
import sys
import warnings
from dataclasses import fields
from typing import Any

from fast_batcher._host.identity import HostKey, find_module_file, make_key
from fast_batcher._host.protocol import Hello
from fast_batcher._transport.codec import dumps
from fast_batcher.errors import ConfigurationError
from fast_batcher.model_spec import ModelSpec
from fast_batcher.settings import Reconfiguration, Settings

# Settings that mean nothing to a host, or are no plain values.
NOT_OF_HOST = frozenset(
    {"cost", "group_by", "observers", "auto_open", "name", "shared", "cache", "key"}
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
    payload = dumps((plain_settings(settings), model_spec.pickled))
    return make_key(settings.shared, payload, find_module_file(module), name)


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
        sys_path=list(sys.path),
        root_level=logging.getLogger().level,
        library_level=logging.getLogger("fast_batcher").getEffectiveLevel(),
        captures_warnings=warnings.showwarning.__module__ == "logging",
        observes=observes,
        supervisor=key.supervisor,
    )
