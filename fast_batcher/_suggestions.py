"""Known names for unknown ones, for error messages and warnings. Pure."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

# Similarity, as `difflib` measures it. `max_dealy` and `max_batch_len` are at 0.89 of what they
# mean; `batch_timeout` and `start_timeout`, which mean different things, reach 0.77.
TYPO = 0.85
SIMILAR = 0.7
# `warm_up_inputs` is at 0.96 of `warmup_inputs`; `clone`, a name of its own, at 0.8 of `close`.
HOOK_TYPO = 0.85

_UNITS = {"s", "sec", "seconds", "ms", "millis", "milliseconds", "us", "microseconds"}
# Words of a name, and the parameters that they stand for, of `DynBatcher` and of the decorators.
# The first whose words all occur counts. Source: the names that BentoML, LitServe, Ray Serve,
# TorchServe, Triton and batched use.
_HOLD = ("max_delay", "timeout_ms")
_MEANINGS = {
    "batch timeout": _HOLD,
    "wait": _HOLD,
    "delay": _HOLD,
    "latency": ("max_latency", "timeout_ms"),
    "timeout": ("timeout", "timeout_ms"),
    "deadline": ("timeout", "timeout_ms"),
    "worker": ("num_workers",),
    "workers": ("num_workers",),
    "processes": ("num_workers",),
    "replicas": ("num_workers",),
    "queue": ("max_queue_size",),
    "batch": ("max_batch_size", "batch_size"),
}


def suggest_parameter(name: str, known: Collection[str]) -> str:
    """Return the end of an error message about an unknown parameter.

    Args:
        name: The unknown one.
        known: The parameters that there are.

    Returns:
        For example ". Did you mean 'max_delay', in seconds?"; "" if no known one is near.
    """
    words = name.lower().split("_")
    bare = "_".join(word for word in words if word not in _UNITS)
    found = (
        _find_close(name, known, TYPO)
        or _find_close(bare, known, TYPO)
        or _find_meaning(words, known)
        or _find_close(name, known, SIMILAR)
    )
    if found is None:
        return ""
    unit = ", in seconds" if bare != "_".join(words) and not found.endswith("_ms") else ""
    return f". Did you mean {found!r}{unit}?"


def find_misspelt(names: Iterable[str], hooks: Collection[str]) -> list[tuple[str, str]]:
    """Return the names that look like misspelt hooks, each with the hook."""
    found = [(name, _find_close(name, hooks, HOOK_TYPO)) for name in names]
    return [(name, hook) for name, hook in found if hook is not None]


def _find_close(name: str, known: Collection[str], likeness: float) -> str | None:
    return next(iter(get_close_matches(name, known, n=1, cutoff=likeness)), None)


def _find_meaning(words: Collection[str], known: Collection[str]) -> str | None:
    """Return the known parameter that the words stand for."""
    for phrase, parameters in _MEANINGS.items():
        found = [one for one in parameters if one in known]
        if found and set(phrase.split()) <= set(words):
            return found[0]
    return None
