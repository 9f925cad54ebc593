"""Cases that only `make soak` runs."""

from typing import Any

import pytest


def long(*values: Any) -> list[Any]:
    """Values of one parameter, whose other values check the same in every run."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
