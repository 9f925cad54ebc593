"""A decoder behind FastAPI, whose characters are sent as they are written. Runs in the API process.

Start it with `uvicorn examples.streams.app:app`; see the README beside this file.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Header, Query, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import FileResponse, Response, StreamingResponse

from examples.streams.decoder import CHARACTERS, LONGEST, Decoder, Prompt
from fast_batcher import BatcherError, DynBatcher, Stream
from fast_batcher.fastapi import (
    cancel_on_disconnect,
    error_responses,
    health_router,
    install_exception_handlers,
    status_router,
)

# Places, and the time to the first character; a stream that would have no place by then gets a 503.
PLACES, MAX_LATENCY = 32, 2.0
# Seconds to the first character, and from one to the next.
TIMEOUT = 10.0
# Characters of a text, and of what is written.
LONGEST_TEXT = LONGEST // 2

batcher = DynBatcher(Decoder, max_batch_size=PLACES, max_latency=MAX_LATENCY, timeout=TIMEOUT)
app = FastAPI(title="A writer", lifespan=batcher.lifespan)
install_exception_handlers(app)
app.include_router(health_router(batcher))
app.include_router(status_router(batcher))


class Request(BaseModel):
    """A text to continue."""

    text: str = Field(
        min_length=1,
        max_length=LONGEST_TEXT,
        pattern=r"^[ -~]+$",
        description=f"Of the characters {CHARACTERS}",
        examples=["Once upon a time"],
    )
    length: int = Field(default=80, ge=1, le=LONGEST_TEXT, description="Characters to write.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="The same seed writes the same.")

    def as_prompt(self) -> Prompt:
        """Return what the model gets."""
        return Prompt(self.text, self.length, self.seed)


Asked = Annotated[Request, Query()]
# Until the first character; after it, a stream leaves anyway when its client disconnects.
endpoint = {"dependencies": [cancel_on_disconnect], "responses": error_responses(503, 504)}


@app.get("/", include_in_schema=False)
async def show_page() -> FileResponse:
    """Show a page that writes over the WebSocket."""
    return FileResponse(Path(__file__).with_name("page.html"))


@app.get("/text", **endpoint)  # type: ignore[arg-type]
async def write_text(asked: Asked) -> StreamingResponse:
    """Write as plain text; an error after the first character cuts the body."""
    stream = await batcher.stream(asked.as_prompt())
    return StreamingResponse(stream, media_type="text/plain")


@app.get("/events", **endpoint)  # type: ignore[arg-type]
async def write_events(
    asked: Asked, last_event_id: Annotated[str | None, Header()] = None
) -> Response:
    """Write as server-sent events; an error after the first character is an event, too."""
    if last_event_id is not None:  # a browser asks again after the end, unless it gets a 204
        return Response(status_code=204)
    stream = await batcher.stream(asked.as_prompt())
    return StreamingResponse(to_events(stream), media_type="text/event-stream")


async def to_events(stream: Stream[str]) -> AsyncIterator[str]:
    """Make an event of each character, and one of the end."""
    async with stream:
        yield "id: 0\n\n"  # what a browser sends when it asks again
        try:
            async for character in stream:
                yield f"data: {json.dumps(character)}\n\n"
        except BatcherError as error:
            yield f"event: failed\ndata: {json.dumps(type(error).__name__)}\n\n"
        else:
            yield "event: end\ndata:\n\n"


@app.websocket("/chat")
async def chat(socket: WebSocket) -> None:
    """Answer each message, a request as JSON, with one message per character, and an empty one."""
    await socket.accept()
    try:
        while True:
            asked = Request.model_validate_json(await socket.receive_text())
            async with await batcher.stream(asked.as_prompt()) as stream:
                async for character in stream:
                    await socket.send_text(character)
            await socket.send_text("")
    except WebSocketDisconnect:
        pass  # the stream has left
    except ValidationError:
        await socket.close(1007, "the message is not a request")
    except BatcherError as error:
        await socket.close(1011, type(error).__name__)
