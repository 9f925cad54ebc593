"""What tests that look inside a batcher need."""

from typing import Any

from fast_batcher import DynBatcher
from fast_batcher._session.session import LocalSession


def session_of(batcher: DynBatcher[Any, Any]) -> LocalSession:
    """The session of a batcher that has been opened."""
    assert isinstance(batcher._session, LocalSession)
    return batcher._session


def pids_of(batcher: DynBatcher[Any, Any]) -> list[int]:
    """The processes of its workers."""
    return [one.pid for one in session_of(batcher).pool.alive() if one.pid is not None]
