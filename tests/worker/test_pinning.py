"""Memory that is registered with CUDA where there is a GPU, and what is said where none is."""

import asyncio
import logging
import multiprocessing
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from desk import (
    LARGE,
    MEBI,
    Desk,
    copier_held,
    desk,
    filled,
    free,
    opened,
    slabs_of,
    until_copying,
)
from memory import memory_of
from sample_models import Digests, Echo, NotAnExceptionError, OnDevice, Raises, Warm, digest

from fast_batcher import WorkerStartupError
from fast_batcher._transport.channel import BlockingChannel, open_pipes
from fast_batcher._transport.codec import loads
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.main import serve
from fast_batcher._worker.pinning import Finishing, pin
from fast_batcher._worker.replies import ReplyEncoder

__all__ = ["desk"]

anyio = pytest.mark.anyio
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


# What computes, and is done with its inputs.


def test_the_device_is_waited_for_when_the_model_has_returned() -> None:
    steps: list[Any] = []

    class Notes:
        def infer(self, inputs: list[int]) -> list[int]:
            steps.append(inputs)
            return [-one for one in inputs]

    model = Finishing(Notes(), lambda: steps.append("waited"))
    assert model.infer([1, 2]) == [-1, -2]
    assert steps == [[1, 2], "waited"]


def test_the_device_is_waited_for_when_the_model_has_raised() -> None:
    steps: list[str] = []
    with pytest.raises(NotAnExceptionError):
        Finishing(Raises(), lambda: steps.append("waited")).infer(["base"])
    assert steps == ["waited"]


def test_what_the_device_has_to_say_is_raised_as_by_the_model() -> None:
    def fail() -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        Finishing(Echo(), fail).infer([1])


@pytest.mark.parametrize(
    ("model", "inputs"), [(Warm([1, 2]), [1, 2]), (Digests(), []), (object(), [])]
)
def test_the_warm_up_is_the_models(model: Any, inputs: Sequence[int]) -> None:
    assert list(Finishing(model, list).warmup_inputs()) == inputs


def test_a_batch_has_its_memory_until_the_device_has_been_waited_for(desk: Desk) -> None:
    desk.dispatch(desk.arrive(filled(0), filled(1)))
    ((kind, batch_id, body),) = desk.queue
    assert kind is Kind.ROWS
    freed: list[list[int]] = []

    class Forgets:
        """Has none of its inputs when it returns."""

        def infer(self, inputs: list[Any]) -> list[int]:
            sizes = [one.size for one in inputs]
            inputs.clear()
            return sizes

    model = Finishing(Forgets(), lambda: freed.append(desk.worker.views.freed[:]))
    ours, theirs = (
        BlockingChannel(ends, MEBI) for ends in open_pipes(multiprocessing.get_context())
    )
    progress = WorkerProgress()
    ours.send(kind, batch_id, body)
    ours.send(Kind.STOP)
    serve(theirs, model, progress.numbers, desk.worker.views, ReplyEncoder(None, MEBI))
    answers = []
    for _ in range(2):
        frame = ours.receive()
        assert frame is not None
        answers.append((frame.kind, loads(frame.body)))
    assert freed == [[]]
    assert answers == [(Kind.FREED, [batch_id]), (Kind.OUTPUT_ATOMS, [filled(0).size] * 2)]
    for closing in (ours, theirs, progress):
        closing.close()


# Registering.


@without_gpu
def test_without_a_gpu_the_model_is_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model = Echo()
    with caplog.at_level(logging.WARNING, "fast_batcher.worker"):
        assert pin(model, 0, MEBI) is model
    assert caplog.messages == ["pin_memory=True changes nothing: PyTorch finds no GPU"]


def test_without_pytorch_the_worker_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(WorkerStartupError, match="pin_memory=True is for models that use PyTorch"):
        pin(Echo(), 0, MEBI)


@without_gpu
def test_what_cuda_refuses_is_an_error_that_tells_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # There is nothing to register it with.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(WorkerStartupError) as caught:
        pin(Echo(), 0, MEBI)
    assert str(caught.value).startswith(
        f"pin_memory=True: CUDA does not register the {MEBI} bytes of max_shared_bytes: "
    )
    assert str(caught.value).endswith("; lower it, or leave pin_memory out")


def test_what_cuda_is_told_and_how_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> str:
            told.append((address, size, flags))
            return "success"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", told.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("waited"))
    assert pin(Echo(), 4096, MEBI).infer([1]) == [1]
    # For every device: cudaHostRegisterPortable.
    assert told == [(4096, MEBI, 1), "success", "waited"]


# Workers.


@pytest.mark.slow
@anyio
async def test_memory_that_may_be_registered_is_not_given_back() -> None:
    value = bytes(LARGE)
    async with opened(Digests, pin_memory=True, max_shared_bytes=64 * MEBI) as batcher:
        assert await batcher.process_batched(value) == digest(value)
        await free(batcher)
        slabs = slabs_of(batcher)
        memory = memory_of(slabs._fd)
        assert memory >= LARGE
        for _ in range(3):
            batcher._pool._give_back_memory(slabs)
            assert slabs.count == 0
        await free(batcher)
        assert memory_of(slabs._fd) == memory
        assert await batcher.process_batched(value) == digest(value)


@pytest.mark.slow
@anyio
async def test_memory_that_nobody_has_used_is_closed_beside_the_loop_too() -> None:
    async with opened(Digests, pin_memory=True, max_shared_bytes=64 * MEBI) as batcher:
        slabs = slabs_of(batcher)
        with copier_held(batcher):
            closing = asyncio.create_task(batcher.aclose())
            await until_copying(batcher)
            assert slabs._fd != -1
        await closing
    assert slabs._fd == -1


@pytest.mark.slow
@without_gpu
@anyio
async def test_without_a_gpu_the_worker_says_so_and_serves(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with opened(Digests, pin_memory=True, max_shared_bytes=64 * MEBI) as batcher:
        assert await batcher.process_batched(b"x") == digest(b"x")
    assert "pin_memory=True changes nothing: PyTorch finds no GPU" in capfd.readouterr().err


@pytest.mark.slow
@on_gpu
@anyio
async def test_inputs_are_copied_to_the_device_from_where_they_lie() -> None:
    size = 64 * MEBI
    before = 0
    async with opened(
        OnDevice, stages=True, max_batch_size=1, pin_memory=True, max_shared_bytes=size
    ) as batcher:
        # All of it has been there since the model was loaded.
        assert memory_of(slabs_of(batcher)._fd) == size
        # The same memory again and again, as soon as it is said to be free.
        for number in range(1, 21):
            array = np.full(MEBI, number, np.float32)
            assert await batcher.process_batched(array) == (True, before * float(MEBI))
            before = number


@pytest.mark.slow
@on_gpu
@anyio
async def test_every_worker_registers_the_memory() -> None:
    array = np.ones(MEBI, np.float32)
    async with opened(
        OnDevice,
        stages=True,
        num_workers=2,
        max_batch_size=1,
        max_batches_per_worker=2,
        pin_memory=True,
        max_shared_bytes=64 * MEBI,
    ) as batcher:
        for _ in range(6):
            answers = await asyncio.gather(*map(batcher.process_batched, [array] * 4))
            assert all(is_pinned for is_pinned, _ in answers)
