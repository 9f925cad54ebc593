"""What an operator sees is the same on every event loop: one is enough, that of uvicorn."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> Any:
    """Return the loop that async tests here run on."""
    return "asyncio", {"use_uvloop": True}
