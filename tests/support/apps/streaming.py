"""An app that streams what its model spells; marks in the text tell the model what else to do."""

import json
import os
from typing import Any, NamedTuple
from weakref import WeakSet

from fastapi import FastAPI
from starlette.responses import StreamingResponse

from apps.disconnect import Middleware
from apps.models import wait_at_gate
from fast_batcher import Done, DynBatcher, SteppedModel
from fast_batcher.fastapi import cancel_on_disconnect, install_exception_handlers

# Marks; none of them needs quoting in a path.
WAIT, FOR_EVER, REFUSE, DIE, FAIL = "-", "~", "!", "$", "*"
# Chunks of some letters. Some hundred of the large one fill the buffers of a connection.
CHUNKS = {".": None, "Z": "z" * 2**15}


class Text(NamedTuple):
    """What is to be spelled, and the gate of its first mark that waits."""

    letters: str
    gate: int


class Whereabouts(NamedTuple):
    """What the worker tells of itself, for the text "?"."""

    pid: int
    # Streams that have joined so far, and those of them that have not left; not counting this one.
    joined: int
    live: int


class Speller(SteppedModel[Text, Any]):
    """Gives one letter of each text in a step.

    At "-" it waits at the gate before the next letter; "~" repeats the letter behind it for ever;
    "." is no chunk and "Z" a large one; a text that begins with "!" is refused; "$" kills the
    worker, and "*" fails its stream.
    """

    def __init__(self) -> None:
        self._joined = self._live = 0

    def join(self, inputs: list[Text]) -> list[Any]:
        if any(text.letters[0] == REFUSE for text in inputs):
            raise ValueError("the words of the model")
        spelled = [text for text in inputs if text.letters != "?"]
        self._joined += len(spelled)
        self._live += len(spelled)
        return [[text, list(text.letters)] for text in inputs]

    def step(self, states: list[Any]) -> list[Any]:
        return [self._spell(text, left) for text, left in states]

    def _spell(self, text: Text, left: list[str]) -> Any:
        if text.letters == "?":
            return Done(Whereabouts(os.getpid(), self._joined, self._live))
        if left[0] == WAIT:
            del left[0]
            wait_at_gate(text.gate)
        if left[0] == DIE:
            os._exit(3)
        if left[0] == FAIL:
            return ValueError("the words of the model\nin two lines")
        if left[0] == FOR_EVER:
            return CHUNKS.get(left[1], left[1])
        letter = left.pop(0)
        chunk = CHUNKS.get(letter, letter)
        return chunk if left else Done(chunk)

    def leave(self, states: list[Any]) -> None:
        self._live -= sum(text.letters != "?" for text, _ in states)


batcher = DynBatcher(Speller, **json.loads(os.environ["OPTIONS"]))
# Those that the app still has; nothing of ours holds them.
streams: WeakSet[Any] = WeakSet()


async def spell(letters: str, gate: int = 0, timeout: float | None = None) -> StreamingResponse:
    stream = await batcher.stream(Text(letters, gate), timeout=timeout)
    streams.add(stream)
    return StreamingResponse(stream)


def make_app(*, drains: bool = False) -> FastAPI:
    app = FastAPI(lifespan=batcher.lifespan(drain_on_sigterm=drains))
    install_exception_handlers(app)
    app.get("/spell/{letters}")(spell)
    app.get("/leaving/{letters}", dependencies=[cancel_on_disconnect])(spell)

    @app.get("/worker")
    async def worker() -> Whereabouts:
        (whereabouts,) = await batcher.process_batched(Text("?", 0))
        return Whereabouts(*whereabouts)

    @app.get("/stats")
    async def stats() -> dict[str, int]:
        names = ("waiting", "running", "cancelled", "expired", "submitted")
        paused = sum(stream._queue.is_paused for stream in streams)
        return {name: getattr(batcher.stats, name) for name in names} | {"paused": paused}

    return app


app = make_app()
draining = make_app(drains=True)
wrapped = make_app()
wrapped.add_middleware(Middleware)
