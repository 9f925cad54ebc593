"""Frames of workers to outcomes: outputs and failures by position."""

import asyncio
import threading
from typing import Any

import pytest
from openings import opening_of
from waits import LIMIT, until

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher._core.values import Order
from fast_batcher._transport.channels import KIND_NAMES
from fast_batcher.errors import TransportError


def test_orders_are_kinds_of_frames() -> None:
    names = {kind: name for kind, name in KIND_NAMES.items() if kind in frozenset(Order)}
    assert names == {order: order.name for order in Order}


class Waits(InferenceModel[Any, Any]):
    """Computes until the test is over."""

    is_over = threading.Event()

    def infer(self, inputs: list[Any]) -> list[Any]:
        self.is_over.wait(LIMIT)
        return inputs


@pytest.mark.anyio
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_wrong_number_of_outcomes_breaks_the_protocol(count: int) -> None:
    Waits.is_over.clear()
    async with DynBatcher(Waits, workers="threads") as batcher:
        calls = [asyncio.create_task(batcher.process_batched(number)) for number in range(2)]
        session = opening_of(batcher)
        await until(lambda: bool(session.scheduler.list_batches()))
        (batch,) = session.scheduler.list_batches()
        message = f"{count} outcomes came back for 2 requests"
        with pytest.raises(TransportError, match=message):
            session.reported(batch.worker, batch.id, 0.0, lambda: ["a"] * count)
        for call in calls:
            with pytest.raises(TransportError, match=message):
                await call
        Waits.is_over.set()
