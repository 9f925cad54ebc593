"""The pytest plugin: the fixture `batcher_kit`, and its options.

pytest loads it by itself wherever fast_batcher is installed. See docs/testing.md.
"""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fast_batcher.testing import BatcherKit

_SCOPES = ("function", "class", "module", "package", "session")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, and the setting of the fixture's scope."""
    group = parser.getgroup("fast_batcher")
    group.addoption(
        "--batcher-workers",
        choices=("threads", "processes"),
        default="threads",
        help="workers of batchers in tests with the fixture batcher_kit: threads of the test's "
        "process (the default), or processes as in production",
    )
    group.addoption(
        "--no-batcher-timeouts",
        action="store_true",
        help="let calls of batchers wait without a limit in these tests: for a debugger",
    )
    parser.addini(
        "batcher_kit_scope",
        f"scope of the fixture batcher_kit: one of {', '.join(_SCOPES)}",
        default="function",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the setting of the fixture's scope."""
    scope = config.getini("batcher_kit_scope")
    if scope not in _SCOPES:
        raise pytest.UsageError(f"batcher_kit_scope = {scope!r}: give one of {', '.join(_SCOPES)}")


def _find_scope(fixture_name: str, config: pytest.Config) -> Any:
    return config.getini("batcher_kit_scope")


@pytest.fixture(scope=_find_scope)
def batcher_kit(pytestconfig: pytest.Config) -> "Iterator[BatcherKit]":
    """A `fast_batcher.testing.BatcherKit` that serves the batchers that open in the test."""
    # The import waits for a test: coverage begins to measure after the plugins were loaded.
    from fast_batcher.testing import BatcherKit

    workers = pytestconfig.getoption("--batcher-workers")
    timeouts = not pytestconfig.getoption("--no-batcher-timeouts")
    with BatcherKit(workers, timeouts=timeouts) as kit:
        yield kit
