"""The routes of the status page: the page, its data, and its stream. API process, event loop."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.params import Depends
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from fast_batcher.batcher import DynBatcher
from fast_batcher.errors import ConfigurationError
from fast_batcher.fastapi.status.report import Report
from fast_batcher.fastapi.status.streams import Streams

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
# A proxy (nginx) passes each event on at once.
_STREAM_HEADERS = {**_HEADERS, "X-Accel-Buffering": "no"}


def status_router(
    *batchers: DynBatcher[Any, Any],
    prefix: str = "",
    dependencies: Sequence[Depends] = (),
    include_in_schema: bool = False,
) -> APIRouter:
    """Make the status page `/batchers`, its data `/batchers.json`, and `/batchers/events`.

    The page shows the batchers of the process that answers: what is wrong with them, and their
    figures of the last five minutes, which count from this call. Whoever can reach the routes can
    read them: they show names, process ids, types of errors and paths of routes, and neither inputs
    nor messages. Protect them with `dependencies` or at the proxy.

    Args:
        batchers: One or more batchers, in the order of the page. Give them before they open: the
            page knows nothing of workers that were started before.
        prefix: Prefix of the paths.
        dependencies: Of all three routes, for example `[Depends(check_password)]`.
        include_in_schema: Whether OpenAPI shows the routes.
    """
    if not batchers:
        raise ConfigurationError("status_router: give the batchers that the page is to show")
    router = APIRouter(
        prefix=prefix,
        dependencies=dependencies,
        include_in_schema=include_in_schema,
        tags=["status"],
    )
    report, streams = Report(batchers), Streams()

    @router.get("/batchers", response_class=HTMLResponse)
    async def page() -> Response:
        html, policy = _make_page()
        return HTMLResponse(html, headers={**_HEADERS, **policy})

    @router.get("/batchers.json")
    async def data() -> Response:
        return JSONResponse(report.read(), headers=_HEADERS)

    @router.get("/batchers/events", response_class=StreamingResponse)
    async def events() -> Response:
        stream = streams.run(report.to_json)
        return StreamingResponse(stream, media_type="text/event-stream", headers=_STREAM_HEADERS)

    return router


@cache
def _make_page() -> tuple[str, dict[str, str]]:
    """Return the page with style and script in it, and the headers that allow just these."""
    folder = files("fast_batcher.fastapi.status")
    html, style, script = (
        folder.joinpath(name).read_text("utf-8") for name in ("page.html", "style.css", "script.js")
    )
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return html.replace("/* style */", style).replace("/* script */", script), headers


def _hash(text: str) -> str:
    """Return a source of a content security policy that allows this very text inline."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
