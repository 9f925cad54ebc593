"""The least that an ASGI app can do: it reads the request and answers. Runs under uvicorn.

What the client and uvicorn alone can do shows against it.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

# As long as the answers of the app that is measured, for reading them costs the client time.
ANSWER = b"x" * int(os.environ.get("FLOOR_ANSWER_BYTES", "100"))
HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(ANSWER)).encode()),
]


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer every POST alike; uvicorn sees by the error that there is no lifespan."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    # Nothing else is here, such as /stats.
    status = 200 if scope["method"] == "POST" else 404
    await send({"type": "http.response.start", "status": status, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})
