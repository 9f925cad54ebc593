"""Routes for liveness and readiness probes. Runs in the API process, on its event loop."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from fast_batcher.batcher import DynBatcher
from fast_batcher.errors import ConfigurationError
from fast_batcher.fastapi.errors import RETRY_AFTER, find_answer

# Seconds that a batcher may be broken before its pod should be restarted. Twice the default
# restart_window: the batcher itself tries again after one window, and its model has another to
# load.
BROKEN_TIMEOUT = 120.0


def health_router(
    *batchers: DynBatcher[Any, Any],
    prefix: str = "",
    include_in_schema: bool = False,
    broken_timeout: float | None = BROKEN_TIMEOUT,
) -> APIRouter:
    """Make the routes `/livez` and `/readyz` for a supervisor's probes.

    `/livez` answers 200 while the event loop runs and no batcher was broken for `broken_timeout`.
    `/readyz` answers 200 while every batcher is ready. Otherwise they answer 503. Each 503, and
    every answer of `/readyz`, has the state of each batcher in its body. The model is not called.

    Args:
        batchers: One or more batchers, which must all be ready.
        prefix: Prefix of the paths.
        include_in_schema: Whether OpenAPI shows the routes.
        broken_timeout: Seconds for which a batcher must be continuously broken until `/livez`
            answers 503, so that the supervisor restarts the server; None for never. They count from
            a failed start, which is not retried, or from the moment at which the workers had spent
            their restarts. A worker is then tried again every `restart_window` seconds: give more
            seconds than that window and the loading of the model take.
    """
    if not batchers:
        raise ConfigurationError("health_router: give the batchers that must be ready")
    if broken_timeout is not None and not broken_timeout >= 0:
        raise ConfigurationError(
            f"health_router: broken_timeout={broken_timeout!r}: give 0 or more seconds, or None"
        )
    router = APIRouter(prefix=prefix, include_in_schema=include_in_schema, tags=["health"])

    headers = {"Cache-Control": "no-store"}

    @router.get("/livez")
    async def livez() -> JSONResponse:
        if all(_may_recover(batcher, broken_timeout) for batcher in batchers):
            return JSONResponse({"status": "alive"}, headers=headers)
        reports = [_report(batcher) for batcher in batchers]
        return JSONResponse({"status": "broken", "batchers": reports}, 503, headers)

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        ready = all(batcher.is_ready for batcher in batchers)
        content = {
            "status": "ready" if ready else "not ready",
            "batchers": [_report(batcher) for batcher in batchers],
        }
        if ready:
            return JSONResponse(content, headers=headers)
        failures = [batcher.start_error for batcher in batchers]
        if all(failure is None or find_answer(failure, 503).may_pass_later for failure in failures):
            return JSONResponse(content, 503, {**headers, "Retry-After": str(RETRY_AFTER)})
        return JSONResponse(content, 503, headers)

    return router


def _may_recover(batcher: DynBatcher[Any, Any], broken_timeout: float | None) -> bool:
    seconds = batcher._status.broken_seconds  # noqa: SLF001  the probe is its only user
    return seconds is None or broken_timeout is None or seconds < broken_timeout


def _report(batcher: DynBatcher[Any, Any]) -> dict[str, Any]:
    stats, failure = batcher.stats, batcher.start_error
    return {
        "name": batcher.name,
        "state": stats.state,
        "workers_ready": stats.workers_ready,
        "num_workers": stats.num_workers,
        "waiting": stats.waiting,
        # Without the error of a model's constructor, which may hold secrets.
        "start_error": failure and (find_answer(failure, 503).detail or str(failure)),
    }
