"""Counts the requests that it answers; the least that an ASGI app can do."""

import json
from typing import Any

answered = 0


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer "/count" with the number of the other requests."""
    global answered
    if scope["type"] == "lifespan":
        while True:
            event = (await receive())["type"]
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/batchers.json":
        status, body = 404, b""
    elif scope["path"] == "/count":
        status, body = 200, json.dumps(answered).encode()
    else:
        answered += 1
        status, body = 200, b"0\r\n\r\n" * 2
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
