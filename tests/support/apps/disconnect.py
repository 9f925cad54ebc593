"""Endpoints that end with their clients: plain and behind a middleware."""

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response

from apps.models import Gated
from fast_batcher import DynBatcher
from fast_batcher.fastapi import cancel_on_disconnect, install_exception_handlers

batcher = DynBatcher(Gated)


class Body(BaseModel):
    """The gate at which the model waits, or 0."""

    gate: int


class Middleware(BaseHTTPMiddleware):
    """Wraps the request as many a middleware of users does."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


async def pass_gate(body: Body) -> int:
    return await batcher.process_batched(body.gate)


def make_app() -> FastAPI:
    app = FastAPI(lifespan=batcher.lifespan)
    install_exception_handlers(app)
    app.post("/pass", dependencies=[cancel_on_disconnect])(pass_gate)

    @app.get("/stats")
    async def stats() -> dict[str, int]:
        stats = batcher.stats
        names = ("waiting", "running", "cancelled", "completed", "batches")
        return {name: getattr(stats, name) for name in names}

    return app


app = make_app()
wrapped = make_app()
wrapped.add_middleware(Middleware)
