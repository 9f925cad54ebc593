"""Marks for tests of what the oldest supported versions of FastAPI lack."""

import fastapi
import pytest
from packaging.version import Version

_VERSION = Version(fastapi.__version__)

needs_included_routers = pytest.mark.skipif(
    Version("0.137") > _VERSION, reason="JsonEndpoint needs FastAPI 0.137"
)
needs_body_limit = pytest.mark.skipif(
    Version("0.164") > _VERSION, reason="FastAPI(max_body_size=...) came with 0.164"
)
