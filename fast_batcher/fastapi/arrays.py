"""Answers with many numbers. Runs in the API process, on its event loop."""

from typing import Any

from starlette.responses import Response

from fast_batcher.encoding import to_json


class ArrayResponse(Response):
    """A JSON answer that may hold NumPy arrays and tensors: `return ArrayResponse({"row": row})`.

    Needs the extra `json`, which is orjson. FastAPI sends it as it is, so what the endpoint
    declares as its response model is documented, and not checked.

    Args:
        content: What `fast_batcher.encoding.to_json` writes; or bytes that it has written, as by a
            model in its worker.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the content."""
        return content if isinstance(content, bytes) else to_json(content)
