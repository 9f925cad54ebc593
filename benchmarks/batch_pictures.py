"""Draws how batches form, for docs/how_batches_form.md: the scheduler decides, in virtual time.

python -m benchmarks.batch_pictures
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import inf
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.simulation.batchers import Ours
from benchmarks.simulation.loads import ClosedLoop
from benchmarks.simulation.models import Model
from fast_batcher._cli.simulation import Arrivals, simulate

# A rest of a batch that is not drawn, seconds.
SHORT = 2e-3
IMAGES = ROOT / "docs" / "images"
MODEL = Model("drawn", 10e-3, 1e-3, 8, target=inf)
# Units of the drawings: as wide as a phone's screen allows without small letters.
WIDTH, LEFT, RIGHT, ROW, HEAD = 460.0, 64.0, 8.0, 17.0, 40.0
# A page defines the colours of its palette; alone, the drawing follows the system.
STYLE = """
.diagram {
  --ink: #1f2328; --soft: #6b7280; --paper: #ffffff;
  --wait: #c2410c; --first: #2563a8; --second: #0f766e;
}
@media (prefers-color-scheme: dark) {
  .diagram {
    --ink: #e6e6e6; --soft: #a0a4ab; --paper: #10151c;
    --wait: #fb923c; --first: #6aa5de; --second: #36b5a6;
  }
}
.diagram text { fill: var(--ink); font: 12px sans-serif; }
.diagram .title { font-weight: bold; font-size: 13px; }
.diagram .note { fill: var(--soft); }
.diagram .label { fill: var(--paper); font-weight: bold; }
.diagram .axis { stroke: var(--soft); stroke-width: 1; }
.diagram .waits { stroke: var(--wait); stroke-width: 2; stroke-dasharray: 3 2; }
.diagram .arrives { fill: var(--wait); }
.diagram .batch0 { fill: var(--first); }
.diagram .batch1 { fill: var(--second); }
"""


@dataclass
class Watched:
    """A worker of the simulation that notes its batches: begin, end and requests."""

    batches: list[tuple[float, float, list[int]]] = field(default_factory=list)

    def seconds(self, now: float, requests: Sequence[int]) -> float:
        """Return the time of a batch that begins now."""
        self.batches.append((now, now + MODEL.seconds(len(requests)), [*requests]))
        return MODEL.seconds(len(requests))


@dataclass(frozen=True)
class Panel:
    """Requests and batches between two moments, in milliseconds from the first one."""

    title: str
    arrivals: dict[int, float]
    batches: list[tuple[float, float, list[int]]]
    span: float

    @property
    def height(self) -> float:
        """Height of its drawing."""
        return HEAD + ROW * (len(self.arrivals) + 1.6) + 22


def watch(title: str, policy: str, load: Arrivals, begin: float, batches: int) -> Panel:
    """Simulate a load, and keep the batches that begin from then on."""
    worker = Watched()
    record = simulate(Ours(policy, MODEL.max_batch_size), load, worker.seconds, begin + 1.0)
    first = sum(batch[0] < begin for batch in worker.batches)
    kept = worker.batches[first : first + batches]
    numbers = sorted({number for _, _, requests in kept for number in requests})
    start = min(record.arrivals[number] for number in numbers) - 1e-3
    # The batch before, if a request waits for it: only the worker's line shows it.
    before = [batch for batch in worker.batches[:first][-1:] if batch[1] > start + SHORT]
    kept = before + kept
    shown = [(max(0, 1e3 * (a - start)), 1e3 * (b - start), requests) for a, b, requests in kept]
    arrivals = {number: 1e3 * (record.arrivals[number] - start) for number in numbers}
    return Panel(title, arrivals, shown, shown[-1][1] + 2)


def draw_box(kind: str, left: float, top: float, width: float, height: float) -> str:
    """Draw a piece of a line: a request or a batch while it is computed."""
    place = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="{kind}" {place} rx="2"/>'


def draw_text(kind: str, left: float, top: float, text: str) -> str:
    """Draw a text: notes and titles from their left end, others around their middle."""
    anchor = "middle" if kind in ("label", "note tick") else "start"
    place = f'x="{left:g}" y="{top:g}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text, quote=False)}</text>'


def draw_panel(panel: Panel, top: float, span: float) -> Iterator[str]:
    """Draw a line for each request, the worker's line, and the time."""
    scale = (WIDTH - LEFT - RIGHT) / span

    def at(moment: float) -> float:
        return round(LEFT + scale * moment, 1)

    rows = {number: top + HEAD + ROW * row for row, number in enumerate(panel.arrivals)}
    below = top + HEAD + ROW * (len(rows) + 0.4)
    yield draw_text("title", 4, top + 16, panel.title)
    yield draw_text("note", 4, top + HEAD, "requests")
    yield draw_text("note", 4, below + 13, "worker")
    for index, (begin, end, requests) in enumerate(panel.batches):
        left, width = at(begin), round(at(end) - at(begin), 1)
        kind = f"batch{index % 2}"
        for number in sorted(rows.keys() & requests):
            y, arrival = rows[number] - 4, at(panel.arrivals[number])
            if left > arrival:
                yield f'<path class="waits" d="M{arrival:g} {y:g}H{left:g}"/>'
            yield draw_box(kind, left, y - 5, width, 10)
            yield f'<circle class="arrives" cx="{arrival:g}" cy="{y:g}" r="4"/>'
        yield draw_box(kind, left, below, width, 18)
        yield draw_text("label", round(left + width / 2, 1), below + 13, str(len(requests)))
    line = below + 26
    yield f'<path class="axis" d="M{at(0):g} {line:g}H{at(span):g}"/>'
    for moment in range(0, int(span) + 1, 10):
        yield f'<path class="axis" d="M{at(moment):g} {line:g}v4"/>'
        text = f"{moment} ms" if moment == 0 else str(moment)
        yield draw_text("note tick", at(moment), line + 16, text)


def draw(panels: Sequence[Panel]) -> str:
    """Draw panels below each other, with one scale of time."""
    parts: list[str] = []
    top, span = 0.0, max(panel.span for panel in panels)
    for panel in panels:
        parts += draw_panel(panel, top, span)
        top += panel.height + 12
    size = f'viewBox="0 0 {WIDTH:g} {top:g}" width="{WIDTH:g}" height="{top:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" role="img" {size}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def draw_all() -> dict[str, str]:
    """Return each drawing by the name of its file."""

    def arrive(*moments: float) -> Arrivals:
        return Arrivals([moment / 1e3 for moment in moments])

    def return_soon() -> ClosedLoop:
        return ClosedLoop(4, lambda random: random.uniform(0.2e-3, 2.5e-3), seed=4)

    free = watch(
        "Two lone requests, then three at once", "adaptive", arrive(1, 18, 34, 34, 34), 0, 3
    )
    busy = watch(
        "Requests arrive while the worker computes",
        *("adaptive", arrive(1, 4, 7, 10, 15, 17, 18, 21, 24, 31, 36), 0, 4),
    )
    split = watch('Without a hold (policy="greedy")', "greedy", return_soon(), 3.0, 4)
    held = watch('With a hold (policy="adaptive")', "adaptive", return_soon(), 3.0, 3)
    return {
        "drawn_free_worker.svg": draw([free]),
        "drawn_next_batch.svg": draw([busy]),
        "drawn_hold.svg": draw([split, held]),
    }


def main(folder: Path = IMAGES) -> None:
    """Draw and store."""
    for name, drawing in draw_all().items():
        (folder / name).write_text(drawing)


if __name__ == "__main__":
    main()
