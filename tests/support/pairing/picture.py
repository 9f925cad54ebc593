"""The table of pairs as a picture, for docs/combinations.md.

PYTHONPATH=.:tests/support python -m pairing.picture
"""

from collections.abc import Iterator

from benchmarks.batch_pictures import IMAGES, STYLE, draw_text
from pairing.dimensions import NO_MEANING, REFUSED_LATE, Choice, Pair
from pairing.table import REFUSED, Verdict, verdict_of

PICTURE = IMAGES / "drawn_combinations.svg"
# What a user calls the values of the dimensions, in the order of the picture.
NAMES: dict[Choice, str] = {
    ("model", "Plain"): "InferenceModel",
    ("model", "Methods"): "batchable methods",
    ("model", "Stages"): "prepare, finish",
    ("model", "Stacked"): "Collation.stack",
    ("model", "Padded"): "Collation.pad",
    ("model", "Ragged"): "Collation.concatenate",
    ("model", "Stepped"): "SteppedModel",
    ("model", "Streamed"): "StreamedModel",
    ("model", "Remembering"): "SessionModel",
    ("workers", "processes"): "workers in processes",
    ("workers", "threads"): "workers in threads",
    ("workers", "shared"): "shared=True",
    ("workers", "kit"): "BatcherKit",
    ("count", "2"): "num_workers=2",
    ("count", "1-2"): "num_workers=(1, 2)",
    ("policy", "greedy"): 'policy="greedy"',
    ("policy", "fixed"): 'policy="fixed"',
    ("policy", "own"): "a policy of your own",
    ("cache", "lru"): "cache",
    ("cost", "summed"): "cost, summed",
    ("cost", "padded"): "cost, padded",
    ("latency", "target"): "max_latency",
    ("recycling", "batches"): "max_batches_per_worker",
    ("sizes", "allowed"): "allowed_batch_sizes",
    ("isolation", "off"): "isolate_errors=False",
    ("places", "few"): "max_sessions",
    ("share", "several"): "share=",
    ("priority", "mixed"): "priority=",
    ("call", "process_many"): "process_many",
    ("call", "submit"): "submit",
    ("call", "stream"): "stream",
    ("call", "session"): "session",
    ("call", "rows"): "process_rows",
    ("event", "reload"): "reload",
    ("event", "reconfigure"): "reconfigure",
}
WORDS: dict[Verdict, str] = {
    "works": "works together",
    "refused": "ConfigurationError when the batcher is constructed",
    "refused late": "an error of the call",
    "no meaning": "no meaning",
}
# Units of the drawing: a cell, the names at the left, and the legend above.
CELL, LEFT, TOP = 13.0, 176.0, 84.0
OWN_STYLE = """\
.diagram text { font-size: 11px; }
.diagram .works { fill: var(--second); opacity: 0.35; }
.diagram .refused { fill: var(--wait); }
.diagram .refused-late { fill: var(--first); }
.diagram .no-meaning { fill: var(--soft); opacity: 0.5; }
"""


def explain(pair: Pair) -> str:
    """Return what a reader sees who points at a cell."""
    names = " with ".join(NAMES[choice] for choice in sorted(pair, key=[*NAMES].index))
    verdict = verdict_of(pair)
    reason = NO_MEANING.get(pair) or REFUSED_LATE.get(pair) or REFUSED.get(pair, "")
    return f"{names}: {WORDS[verdict]}{reason and f' ({reason})'}"


def draw_cell(pair: Pair, left: float, top: float) -> str:
    """Draw one pair."""
    kind = verdict_of(pair).replace(" ", "-")
    place = f'x="{left:g}" y="{top:g}" width="{CELL - 1:g}" height="{CELL - 1:g}"'
    title = explain(pair).replace('"', "&quot;")
    return f'<rect class="{kind}" {place}><title>{title}</title></rect>'


def draw_parts() -> Iterator[str]:
    """Draw the legend, and a row for each name, with a cell for each name above it."""
    for row, (verdict, words) in enumerate(WORDS.items()):
        kind = verdict.replace(" ", "-")
        place = f'x="4" y="{4 + 18 * row}" width="{CELL - 1:g}" height="{CELL - 1:g}"'
        yield f'<rect class="{kind}" {place}/>'
        yield draw_text("note", 24, 14 + 18 * row, words)
    for row, choice in enumerate(NAMES):
        top = TOP + CELL * row
        yield draw_text("name", 4, top + 10, NAMES[choice])
        for column, other in enumerate([*NAMES][:row]):
            if other[0] != choice[0]:
                yield draw_cell(frozenset({choice, other}), LEFT + CELL * column, top)
        # The name of the column, along the diagonal.
        yield draw_text("note", LEFT + CELL * row + 2, top + 10, NAMES[choice])


def draw_combinations() -> str:
    """Draw the table of pairs."""
    width, height = LEFT + CELL * len(NAMES) + 150, TOP + CELL * len(NAMES) + 4
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" role="img" {size}>'
    return "\n".join([head, f"<style>{STYLE}{OWN_STYLE}</style>", *draw_parts(), "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw_combinations())
