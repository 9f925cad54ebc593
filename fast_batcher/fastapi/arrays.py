"""JSON responses with arrays. Runs in the API process, on its event loop."""

from typing import Any

from starlette.responses import Response

from fast_batcher.encoding import to_json


class ArrayResponse(Response):
    """JSON response that may hold NumPy arrays and tensors: `return ArrayResponse({"row": row})`.

    Needs the extra `json`, which installs orjson. FastAPI sends a response unchanged, so the
    endpoint's response model is documented in OpenAPI, but not checked.

    Args:
        content: A value for `fast_batcher.encoding.to_json`; or bytes that it has written, for
            example in a worker.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the content."""
        return content if isinstance(content, bytes) else to_json(content)
