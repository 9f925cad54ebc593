"""Draws the time limits of a request and of a worker, for docs/settings.md.

python -m benchmarks.limit_picture
"""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.batch_pictures import IMAGES, RIGHT, STYLE, WIDTH, draw_box, draw_text

PICTURE = IMAGES / "drawn_time_limits.svg"
# Units of the drawing: the left edge of the bars, and the height of a phase and of a limit.
LEFT, BAR, ROW = 104.0, 22.0, 36.0
OWN_STYLE = """\
.diagram .queued { fill: var(--wait); }
.diagram .limit { stroke: var(--ink); stroke-width: 2; fill: none; }
"""


class Phase(NamedTuple):
    """A part of a life, and its end in percent of the drawing's width."""

    kind: str
    text: str
    end: float


class Limit(NamedTuple):
    """A setting, the span that it limits in percent, and what happens at its end."""

    name: str
    begin: float
    end: float
    effect: str


class Life(NamedTuple):
    """The phases of a life from left to right, its named moments, and its limits."""

    title: str
    phases: list[Phase]
    moments: dict[str, float]
    limits: list[Limit]

    @property
    def height(self) -> float:
        """Height of its drawing."""
        return 48 + BAR + ROW * len(self.limits) + 8


LIVES = [
    Life(
        "The life of a request",
        [Phase("queued", "queue", 27), Phase("batch1", "hold", 43), Phase("batch0", "worker", 78)],
        {"arrival": 0, "answer": 78},
        [
            Limit("max_delay", 27, 47, "longest hold; then the batch leaves"),
            Limit("infer_timeout", 43, 84, "longest batch; then its worker is replaced"),
            Limit("max_latency", 0, 90, "target for the answer; a predicted miss fails early"),
            Limit("timeout", 0, 98, "longest wait for the answer; then the call fails"),
        ],
    ),
    Life(
        "The life of a worker",
        [
            Phase("batch1", "load", 26),
            Phase("batch0", "batches", 58),
            Phase("queued", "drain", 78),
            Phase("batch1", "end", 92),
        ],
        {"start": 0, "aclose()": 58},
        [
            Limit("start_timeout", 0, 32, "longest load of the model; then the worker is killed"),
            Limit("drain_timeout", 58, 84, "longest wait for accepted requests; then they fail"),
            Limit("stop_timeout", 78, 98, "longest wait for the end; then it is terminated"),
        ],
    ),
]


def place(percent: float) -> float:
    """Return the horizontal position of a percentage."""
    return round(LEFT + (WIDTH - LEFT - RIGHT) * percent / 100, 1)


def draw_life(life: Life, top: float) -> Iterator[str]:
    """Draw the phases as one bar, and each limit as a line below it."""
    bar = top + 48
    yield draw_text("title", 4, top + 16, life.title)
    for name, moment in life.moments.items():
        yield draw_text("note", place(moment), top + 40, name)
    begin = 0.0
    for kind, text, end in life.phases:
        left, width = place(begin), round(place(end) - place(begin) - 1, 1)
        yield draw_box(kind, left, bar, width, BAR)
        yield draw_text("label", round(left + width / 2, 1), bar + 15, text)
        begin = end
    for row, (name, begin, end, effect) in enumerate(life.limits):
        y = bar + BAR + ROW * row + 16
        ends = f"M{place(begin):g} {y - 5:g}v10M{place(end):g} {y - 5:g}v10"
        yield draw_text("name", 4, y + 4, name)
        yield f'<path class="limit" d="M{place(begin):g} {y:g}H{place(end):g}{ends}"/>'
        yield draw_text("note", LEFT, y + 18, effect)


def draw_limits() -> str:
    """Draw both lives below each other."""
    parts: list[str] = []
    top = 0.0
    for life in LIVES:
        parts += draw_life(life, top)
        top += life.height + 12
    size = f'viewBox="0 0 {WIDTH:g} {top:g}" width="{WIDTH:g}" height="{top:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" role="img" {size}>'
    return "\n".join([head, f"<style>{STYLE}{OWN_STYLE}</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw_limits())
