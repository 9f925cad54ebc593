"""Endpoints of several kinds, without a batcher: what `fast-batcher bench` is tried on."""

from collections import Counter
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Response
from pydantic import BaseModel, Field

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
