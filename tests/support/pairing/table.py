"""The table of pairs: works, refused, or no meaning. Data, and the questions that it answers."""

from typing import Literal

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


# Pairs that the constructor refuses, with the option that its message names.
REFUSED: dict[Pair, str] = {
    **_of("model", ("Remembering",), "cache", ("lru", "slow"), "cache"),
    **_of("model", but("model", "Remembering"), "places", ("few",), "max_sessions"),
    **_of("places", ("few",), "cache", ("lru", "slow"), "cache"),
    **_of("places", ("few",), "sizes", ("allowed",), "allowed_batch_sizes"),
    **_of("model", STEPPED, "policy", ("greedy", "own"), "policy"),
    **_of("model", STEPPED, "policy", ("fixed",), "max_delay"),
    **_of("model", STEPPED, "cache", ("lru", "slow"), "cache"),
    **_of("model", STEPPED, "cost", ("summed",), "cost_is_padded"),
    **_of("model", STEPPED, "isolation", ("off",), "isolate_errors"),
    **_of(
        "model", (*STEPPED, "Remembering", "Ragged"), "sizes", ("allowed",), "allowed_batch_sizes"
    ),
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
