"""FastAPI integration: lifespans, dependencies, bodies, HTTP errors, health probes.

    lifespan        several lifespans as one
    dependencies    the batcher, and a client's own deadline
    disconnects     cancellation of endpoints whose client has disconnected
    bodies          limits on the bytes and the time of request bodies
    errors          errors as HTTP answers, and for OpenAPI
    health          the two routes for a supervisor's probes
    status          the status page of batchers
    json_endpoint   JSON endpoints without FastAPI's request handling
    arrays          JSON answers with arrays

Runs in the API process, on its event loop. No other part of the library imports this package or
FastAPI.
"""

try:
    import fastapi  # noqa: F401  only to say what is missing
except ModuleNotFoundError as _missing:
    if _missing.name != "fastapi":
        raise
    raise ModuleNotFoundError(
        "fast_batcher.fastapi needs FastAPI: pip install 'fast_batcher[fastapi]'", name="fastapi"
    ) from _missing

from fast_batcher.fastapi.bodies import (
    BODY_TIMEOUT,
    MAX_BODY_BYTES,
    BodyError,
    LimitBody,
    read_array,
    read_body,
)
from fast_batcher.fastapi.disconnects import cancel_on_disconnect
from fast_batcher.fastapi.edge import (
    BROKEN_TIMEOUT,
    TIMEOUT_HEADER,
    ArrayResponse,
    combine_lifespans,
    dependency,
    health_router,
    request_timeout,
)
from fast_batcher.fastapi.errors import (
    ANSWERS,
    ErrorBody,
    error_responses,
    install_exception_handlers,
)
from fast_batcher.fastapi.json_endpoint import JsonEndpoint
from fast_batcher.fastapi.status import status_router

__all__ = [
    "ANSWERS",
    "BODY_TIMEOUT",
    "BROKEN_TIMEOUT",
    "MAX_BODY_BYTES",
    "TIMEOUT_HEADER",
    "ArrayResponse",
    "BodyError",
    "ErrorBody",
    "JsonEndpoint",
    "LimitBody",
    "cancel_on_disconnect",
    "combine_lifespans",
    "dependency",
    "error_responses",
    "health_router",
    "install_exception_handlers",
    "read_array",
    "read_body",
    "request_timeout",
    "status_router",
]
