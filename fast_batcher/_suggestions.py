"""Suggestions of known names for misspelt ones, for error messages and warnings. Pure."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

# Similarity ratios of `difflib`. `max_dealy` and `max_batch_len` reach 0.89 with the intended name;
# `batch_timeout` and `start_timeout`, which mean different things, 0.77.
TYPO = 0.85
SIMILAR = 0.7
# `warm_up_inputs` reaches 0.96 with `warmup_inputs`; `clone`, another name, 0.8 with `close`.
HOOK_TYPO = 0.85

_UNITS = {"s", "sec", "seconds", "ms", "millis", "milliseconds", "us", "microseconds"}
# Words of an unknown name, and the intended parameters of `DynBatcher` and of the decorators. The
# first entry whose words all occur counts. Source: parameter names of BentoML, LitServe, Ray Serve,
# TorchServe, Triton and batched.
_HOLD = ("max_delay", "timeout_ms")
# The decorators, as those of `batched`, call the longest wait for a batch `timeout_ms`; by its look
# it would be `timeout`, the limit of a call.
_SAME = {"timeout_ms": "max_delay"}
_MEANINGS = {
    "batch timeout": _HOLD,
    "wait": _HOLD,
    "delay": _HOLD,
    "latency": ("max_latency", "timeout_ms"),
    "timeout": ("timeout", "timeout_ms"),
    "deadline": ("timeout", "timeout_ms"),
    "gpu": ("devices",),
    "gpus": ("devices",),
    "device": ("devices",),
    "worker": ("num_workers",),
    "workers": ("num_workers",),
    "processes": ("num_workers",),
    "replicas": ("num_workers",),
    "queue": ("max_queue_size",),
    "batch": ("max_batch_size", "batch_size"),
}


def suggest_parameter(name: str, known: Collection[str]) -> str:
    """Return the end of an error message about an unknown parameter."""
    words = name.lower().split("_")
    bare = "_".join(word for word in words if word not in _UNITS)
    same = _SAME.get(name)
    found = (
        (same if same in known else None)
        or _find_close(name, known, TYPO)
        or _find_close(bare, known, TYPO)
        or _find_meaning(words, known)
        or _find_close(name, known, SIMILAR)
    )
    if found is None:
        return ""
    unit = ", in seconds" if bare != "_".join(words) and not found.endswith("_ms") else ""
    return f". Did you mean {found!r}{unit}?"


def find_misspelt(names: Iterable[str], hooks: Collection[str]) -> list[tuple[str, str]]:
    """Return names that look like misspelt hooks, each with the hook."""
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
