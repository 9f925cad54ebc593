"""The values that go into the core and come out of it."""

import gc
import weakref

from schedulers import make_request

from fast_batcher._core.values import Batch, ExpiryReason, Release


def test_reasons_are_the_words_that_users_see() -> None:
    assert " ".join(Release) == "full idle hold window deadline drain retry"
    assert ", ".join(ExpiryReason) == (
        "waiting, not ready, running, infer timeout, retired, unreachable"
    )


def test_a_batch_is_freed_without_the_garbage_collector() -> None:
    """An input may be large; it must go when its batch goes, not when the collector comes by."""

    class Input:
        pass

    value = Input()
    seen = weakref.ref(value)
    gc.disable()
    try:
        requests = [make_request(value, 1.0)]
        batch = Batch(0, 0, requests, Release.FULL, deadline=1.0, open_count=1, sent_at=0.0)
        requests[0].batch_id = batch.id
        del value, requests, batch
        assert seen() is None
    finally:
        gc.enable()
