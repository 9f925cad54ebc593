"""Endpoints of several kinds, without a batcher: what `fast-batcher bench` is tried on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Response
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

app = FastAPI()
asked: Counter[str] = Counter()


class Text(BaseModel):
    text: Annotated[str, Field(min_length=3, examples=["one", "three"])]


class Name(BaseModel):
    name: Annotated[str, Field(pattern="^[a-z]+$")]


@app.post("/length")
async def length(body: Text) -> int:
    return len(body.text)


@app.get("/shout/{text}")
async def shout(text: str) -> str:
    return text.upper()


@app.post("/greet")
async def greet(body: Name) -> str:
    return body.name


@app.post("/busy")
async def busy(body: Text) -> None:
    raise HTTPException(503, "the queue\nis full")


@app.post("/sometimes-busy")
async def sometimes_busy(body: Text) -> None:
    asked["sometimes-busy"] += 1
    if asked["sometimes-busy"] % 3 == 0:
        raise HTTPException(503, "the queue is full")


@app.post("/guarded")
async def guard(authorization: Annotated[str, Header()] = "") -> None:
    if authorization != "Bearer secret":
        raise HTTPException(401, "no token")


@app.get("/labelled")
async def label() -> Response:
    # It comes before the header that has the length.
    return Response("short", headers={"X-Uncompressed-Content-Length": "999"})


@app.get("/parts")
async def send_parts() -> StreamingResponse:
    return StreamingResponse(_make_parts())


async def _make_parts() -> AsyncIterator[str]:
    for part in ("one", "two", "three"):
        yield part
        # So long that a client reads the parts apart.
        await asyncio.sleep(0.02)


@app.get("/large")
async def large() -> Response:
    """A body that comes in many parts, because it is larger than what a socket holds."""
    return Response(bytes(2**23))
