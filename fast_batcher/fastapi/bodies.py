"""Limits on the bytes and the time of request bodies. Runs in the API process, on its event loop.

FastAPI's `max_body_size` limits the bytes of every body of an app. This module adds a time limit
for every body (`LimitBody`), and readers for endpoints that take bytes or an array.
"""

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fast_batcher._shared_memory.inputs import to_shape
from fast_batcher.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from fast_batcher.batcher import DynBatcher

# A body larger than this is refused: room for a dozen photographs.
MAX_BODY_BYTES = 16 * 2**20
# A body that takes longer to arrive than this is refused: 16 MiB over a line of 5 Mbit/s.
BODY_TIMEOUT = 30.0
# The status of a request whose client has gone, for logs and metrics; no client reads it.
# Source: nginx, which logs the same.
CLIENT_CLOSED_REQUEST = 499
# Keys of a request's scope: set once `read_body` or `read_array` has read the whole body; and a
# function that is to be called then.
BODY_IS_READ, WHEN_BODY_IS_READ = "fast_batcher.body_is_read", "fast_batcher.when_body_is_read"
# A number of more digits than this is above every limit, and Python refuses to read 5000 of them.
MOST_LENGTH_DIGITS = 18


class LimitBody:
    """Middleware that answers slow bodies with 408: `app.add_middleware(LimitBody)`.

    It buffers nothing. The size of bodies is limited by FastAPI: `FastAPI(max_body_size=...)`.

    Args:
        app: The ASGI app; Starlette passes it.
        timeout: Seconds from the first read of a body to its end, above 0.
    """

    def __init__(self, app: ASGIApp, *, timeout: float = BODY_TIMEOUT) -> None:
        if not timeout > 0:
            raise ConfigurationError(f"LimitBody: timeout={timeout!r}: give more than 0 seconds")
        self._app = app
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        deadline: float | None = None
        is_whole = False

        async def receive_in_time() -> Message:
            nonlocal deadline, is_whole
            if is_whole:  # the next message is the disconnect, which has no limit
                return await receive()
            if deadline is None:
                deadline = asyncio.get_running_loop().time() + self._timeout
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {self._timeout:g} seconds"
                raise HTTPException(408, text, {"Connection": "close"}) from None
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, receive_in_time, send)


class BodyError(HTTPException):
    """Rejection of a body by `read_body` or `read_array`.

    `install_exception_handlers` answers it with an `ErrorBody`; without the handlers FastAPI
    answers with status and detail alone.
    """

    def __init__(self, status: int, code: str, detail: str, *, is_read: bool = False) -> None:
        # The server would read the rest of the body to find the next request.
        super().__init__(status, detail, None if is_read else {"Connection": "close"})
        # `request_too_large`, `wrong_length` or `length_required`.
        self.code = code


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read a body of at most `max_bytes` bytes.

    Use it in a dependency of an endpoint that takes plain bytes: an encoded image, a sound.
    `LimitBody` limits the time of every body of an app.

    Args:
        request: The request, whose body has not been read.
        max_bytes: Bytes of the longest body.

    Raises:
        BodyError: 413 if the body is longer. A body with a Content-Length is refused before any of
            it is read, any other as soon as it is too long.
        HTTPException: 499 if the client disconnected before the end of the body.
    """
    _check_announced_length(request, max_bytes)
    pieces: list[bytes] = []
    await _receive(request, max_bytes, pieces.append)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def read_array(
    request: Request,
    shape: int | Sequence[int],
    dtype: "DTypeLike",
    *,
    max_bytes: int = MAX_BODY_BYTES,
    into: "DynBatcher[Any, Any] | None" = None,
) -> "NDArray[Any]":
    """Read the bytes of one array from a body, directly into the array.

    The bytes are not checked: the model must handle NaN and infinity. A file, for example a JPEG,
    is an array too: `read_array(request, -1, "uint8", into=batcher)`.

    Args:
        request: The request, whose body has not been read.
        shape: The shape of the array, in C order. One size may be -1 and follows from the body's
            length; the client must then send a Content-Length.
        dtype: The dtype of the array. `"<f4"` fixes the byte order, `"float32"` means the server's.
        max_bytes: Bytes of the longest body.
        into: The batcher that the array is for. The body is read into memory shared with its
            workers (`DynBatcher.allocate_input`), so that it is not copied again.

    Raises:
        BodyError: 413 if the array or the body has more than `max_bytes`; 422 if the lengths of
            body and array differ; 411 if a size is -1 and there is no Content-Length. A body with a
            Content-Length is refused before any of it is read and before the array is made.
        HTTPException: 499 if the client disconnected before the end of the body.
        ConfigurationError: Shape and dtype do not describe an array of numbers. An app whose
            clients choose them must check them first.
    """
    import numpy as np  # an extra, and endpoints without arrays do not load it

    announced = _check_announced_length(request, max_bytes)
    try:
        sizes, kind = to_shape(shape), np.dtype(dtype)
    except Exception as error:  # of six types: NumPy parses texts
        raise _invalid_array(shape, dtype, error) from error
    sizes = _find_shape(sizes, kind, announced, max_bytes)
    try:
        array = (np.empty if into is None else into.allocate_input)(sizes, kind)
    except ValueError as error:  # no bytes, but more dimensions or larger ones than there can be
        raise _invalid_array(sizes, kind, error) from error
    left = array.reshape(-1).view(np.uint8).data

    def put(piece: bytes) -> None:
        nonlocal left
        if len(piece) > len(left):
            raise _wrong_length(sizes, kind, "more")
        left[: len(piece)] = piece
        left = left[len(piece) :]

    await _receive(request, max_bytes, put)
    if left:
        raise _wrong_length(sizes, kind, array.nbytes - len(left), is_read=True)
    return array


def _find_shape(
    sizes: tuple[int, ...], dtype: "np.dtype[Any]", announced: int | None, max_bytes: int
) -> tuple[int, ...]:
    """Return the shape of the array, with -1 replaced by the size that the body's length gives."""
    step = dtype.itemsize * math.prod(size for size in sizes if size != -1)
    if dtype.hasobject or not dtype.itemsize or min(sizes, default=0) < -1 or sizes.count(-1) > 1:
        raise _invalid_array(sizes, dtype, "they do not describe an array of numbers")
    if step > max_bytes:  # the text omits `step`, which may have too many digits for Python
        text = f"{_describe_array(sizes, dtype)} has more bytes than the {max_bytes} of a body"
        raise BodyError(413, "request_too_large", text)
    if -1 not in sizes:
        if announced not in (None, step):
            raise _wrong_length(sizes, dtype, announced)
        return sizes
    if announced is None:
        raise BodyError(411, "length_required", "the body needs a Content-Length")
    if step == 0 or announced % step:
        text = f"the body has {announced} bytes, not a multiple of {step}"
        raise BodyError(422, "wrong_length", text)
    return tuple(announced // step if size == -1 else size for size in sizes)


def _invalid_array(shape: object, dtype: object, reason: object) -> ConfigurationError:
    return ConfigurationError(
        f"read_array: shape={shape!r:.100}, dtype={dtype!r:.100}: {reason!s:.100}; give sizes of 0 "
        "or more, of which one may be -1, and a numeric dtype of fixed size"
    )


def _describe_array(sizes: tuple[int, ...], dtype: "np.dtype[Any]") -> str:
    return f"an array of shape {sizes!r:.100} and dtype {dtype}"


def _wrong_length(
    sizes: tuple[int, ...], dtype: "np.dtype[Any]", found: object, *, is_read: bool = False
) -> BodyError:
    expected = math.prod(sizes) * dtype.itemsize
    text = f"{_describe_array(sizes, dtype)} has {expected} bytes, the body {found}"
    return BodyError(422, "wrong_length", text, is_read=is_read)


def client_has_gone() -> HTTPException:
    """Make the error that ends a request whose client has disconnected."""
    return HTTPException(CLIENT_CLOSED_REQUEST, "the client has disconnected")


def _check_announced_length(request: Request, max_bytes: int) -> int | None:
    """Return the Content-Length in bytes, None without a valid one."""
    digits = request.headers.get("content-length", "")
    if not (digits.isascii() and digits.isdigit()):
        return None  # the bytes are counted as they arrive
    announced = int(digits) if len(digits) <= MOST_LENGTH_DIGITS else sys.maxsize
    if announced > max_bytes:
        raise _too_large(max_bytes)
    return announced


def _too_large(max_bytes: int) -> BodyError:
    return BodyError(413, "request_too_large", f"the body is larger than {max_bytes} bytes")


async def _receive(request: Request, max_bytes: int, put: Callable[[bytes], object]) -> None:
    """Receive a body and call `put` with each piece of it."""
    size = 0
    try:
        async with aclosing(request.stream()) as pieces:
            async for piece in pieces:
                size += len(piece)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if piece:  # the last one is empty
                    put(piece)
    except ClientDisconnect:
        raise client_has_gone() from None
    request.scope[BODY_IS_READ] = True
    if WHEN_BODY_IS_READ in request.scope:
        request.scope.pop(WHEN_BODY_IS_READ)()
