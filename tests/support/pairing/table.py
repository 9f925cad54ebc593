"""The table of pairs: works, refused, or no meaning. Data, and the questions that it answers."""

from typing import Literal

from fast_batcher import settings
from fast_batcher.settings import Circumstance
from pairing.dimensions import (
    NO_MEANING,
    REFUSED_LATE,
    STEPPED,
    Pair,
    ask_constructor,
    but,
    complete,
    list_pairs,
)

Verdict = Literal["works", "refused", "refused late", "no meaning"]


def _of(
    one: str, values: tuple[str, ...], other: str, others: tuple[str, ...], word: str
) -> dict[Pair, str]:
    return {frozenset({(one, a), (other, b)}): word for a in values for b in others}


# Choices that give an option another value than its default, in the order of the options.
GIVEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "max_delay": ("policy", ("fixed",)),
    "policy": ("policy", ("greedy", "own")),
    "cost_is_padded": ("cost", ("summed",)),
    "max_sessions": ("places", ("few",)),
    "isolate_errors": ("isolation", ("off",)),
    "cache": ("cache", ("lru", "slow")),
}
# Choices that bring a circumstance about.
HOLDS: dict[Circumstance, tuple[str, tuple[str, ...]]] = {
    settings.STEPPED: ("model", STEPPED),
    settings.REMEMBERING: ("model", ("Remembering",)),
    settings.NO_SESSIONS: ("model", but("model", "Remembering")),
}
# Pairs that the constructor refuses, with the option that its message names: options that have no
# effect, as they are declared; then rules about models, and about one value of an option.
REFUSED: dict[Pair, str] = {
    pair: name
    for name, choices in GIVEN.items()
    for circumstance, _ in settings.OPTIONS[name].no_effect
    if circumstance in HOLDS
    for pair in _of(*choices, *HOLDS[circumstance], name)
} | {
    **_of("places", ("few",), "cache", ("lru", "slow"), "cache"),
    **_of("places", ("few",), "sizes", ("allowed",), "allowed_batch_sizes"),
    **_of("model", ("Remembering", "Ragged"), "sizes", ("allowed",), "allowed_batch_sizes"),
    **_of("workers", ("shared",), "policy", ("own",), "policy"),
}  # fmt: skip


def verdict_of(pair: Pair) -> Verdict:
    if pair in REFUSED:
        return "refused"
    if pair in REFUSED_LATE:
        return "refused late"
    return "no meaning" if pair in NO_MEANING else "works"


def find_differences() -> list[str]:
    """Ask the constructor about each pair of the table; return where it says something else."""
    found = []
    for pair in list_pairs():
        said = ask_constructor(complete(pair))
        named = REFUSED.get(pair)
        if (named is None) != (said == ""):
            found.append(f"{sorted(pair)}: table {named!r}, constructor {said!r:.200}")
        elif named is not None and named not in said:
            found.append(f"{sorted(pair)}: the message does not name {named}: {said!r:.200}")
    return found
