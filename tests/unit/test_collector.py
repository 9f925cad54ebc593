"""The garbage collector while an app serves. Each test runs in a process of its own."""

import asyncio
import gc

import pytest
from programs import run_program

from fast_batcher import DynBatcher, InferenceModel

pytestmark = pytest.mark.slow

START = "import gc\nfrom fast_batcher._process import frozen\n"


class FrozenCounter(InferenceModel[None, int]):
    """Answers how many objects its process has frozen."""

    def infer(self, inputs: list[None]) -> list[int]:
        return [gc.get_freeze_count() for _ in inputs]


def run(program: str) -> None:
    """Run a program; what it asserts fails the test."""
    done = run_program(START + program)
    assert done.returncode == 0, done.stderr


def test_freezing_keeps_thresholds() -> None:
    run("""
before = gc.get_threshold()
with frozen():
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == before
assert gc.get_freeze_count() == 0
""")


def test_initial_garbage_is_collected_before_freezing() -> None:
    run("""
import weakref
class Node: pass
node = Node(); node.itself = node
gone = weakref.ref(node)
del node
with frozen():
    assert gone() is None
""")


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_last_of_several_blocks_unfreezes(first_to_end: int) -> None:
    run(f"""
blocks = [frozen(), frozen()]
for block in blocks:
    block.__enter__()
blocks.pop({first_to_end}).__exit__(None, None, None)
assert gc.get_freeze_count()
blocks.pop().__exit__(None, None, None)
assert gc.get_freeze_count() == 0
""")


def test_frozen_objects_of_the_app_stay_frozen() -> None:
    run("""
gc.freeze()
count = gc.get_freeze_count()
with frozen():
    made = [[] for _ in range(5000)]
    assert gc.get_freeze_count() <= count
assert gc.get_freeze_count() > count - 100
""")


@pytest.mark.parametrize("freeze_gc", [True, False])
def test_worker_freezes_its_model_by_default(freeze_gc: bool) -> None:
    async def ask() -> int:
        async with DynBatcher(FrozenCounter, freeze_gc=freeze_gc) as batcher:
            return await batcher.process_batched(None)

    assert (asyncio.run(ask()) > 1000) is freeze_gc


@pytest.mark.parametrize("freeze_gc", [True, False])
def test_lifespan_freezes_the_app_by_default(freeze_gc: bool) -> None:
    run(f"""
import asyncio
from fast_batcher import DynBatcher
from models.base import Echo
async def serve():
    batcher = DynBatcher(Echo)
    async with batcher.lifespan(freeze_gc={freeze_gc})(None):
        assert bool(gc.get_freeze_count()) is {freeze_gc}
        assert await batcher.process_batched(1) == 1
if __name__ == "__main__":
    for _ in range(3):
        asyncio.run(serve())
        assert not gc.get_freeze_count()
""")
