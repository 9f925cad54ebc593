"""What a FastAPI app needs around a batcher. Runs in the API process, on its event loop.

    lifespan        several lifespans as one
    dependencies    the batcher, a client's own deadline, and the end of requests without a client
    bodies          bodies that are read within limits of bytes and time
    errors          one table from errors to HTTP statuses, for answers and for OpenAPI
    health          the two routes for a supervisor's probes
    json_endpoint   JSON endpoints without FastAPI's request handling

Nothing inside the library imports this package; only it knows FastAPI or an HTTP status.
"""

try:
    import fastapi  # noqa: F401  only to say what is missing
except ModuleNotFoundError as error:
    if error.name != "fastapi":
        raise
    raise ModuleNotFoundError(
        "fast_batcher.fastapi needs FastAPI: pip install 'fast_batcher[fastapi]'", name="fastapi"
    ) from error

from fast_batcher.fastapi.arrays import ArrayResponse
from fast_batcher.fastapi.bodies import (
    BODY_TIMEOUT,
    MAX_BODY_BYTES,
    BodyError,
    LimitBody,
    read_array,
    read_body,
)
from fast_batcher.fastapi.dependencies import TIMEOUT_HEADER, dependency, request_timeout
from fast_batcher.fastapi.disconnects import cancel_on_disconnect
from fast_batcher.fastapi.errors import (
    ANSWERS,
    ErrorBody,
    error_responses,
    install_exception_handlers,
)
from fast_batcher.fastapi.health import BROKEN_TIMEOUT, health_router
from fast_batcher.fastapi.json_endpoint import JsonEndpoint
from fast_batcher.fastapi.lifespan import combine_lifespans

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
]
