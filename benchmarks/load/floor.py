"""The least that an ASGI app can do: it reads the request and answers. Runs under uvicorn.

Against it the client and uvicorn alone are measured.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

# As long as the answers of the app that is measured, as reading them costs the client time.
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
    """Answer every POST; the error tells uvicorn that there is no lifespan."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    # There is no other path, so /stats is 404.
    status = 200 if scope["method"] == "POST" else 404
    await send({"type": "http.response.start", "status": status, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})
