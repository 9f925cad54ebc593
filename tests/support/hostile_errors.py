"""Exceptions whose own attributes and methods raise. In tests and in workers."""

import asyncio
import random
from typing import Any

# Attributes of every exception; reading a hostile one raises.
ATTRIBUTES = (
    "__class__",
    "__traceback__",
    "__cause__",
    "__context__",
    "__suppress_context__",
    "__notes__",
    "args",
)
METHODS = (
    "__str__",
    "__repr__",
    "__format__",
    "__reduce__",
    "__reduce_ex__",
    "__getattribute__",
    "__setattr__",
    "__eq__",
    "__hash__",
    "__bool__",
    "__init_subclass__",
    "with_traceback",
)
# No `KeyboardInterrupt` or `SystemExit`, which end the event loop on which they are raised.
BASES = (
    Exception,
    ValueError,
    KeyError,
    RuntimeError,
    OSError,
    MemoryError,
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    BaseException,
    asyncio.CancelledError,
)
ALL = (*ATTRIBUTES, *METHODS)


def make_hostile(draw: random.Random, *names: str) -> BaseException:
    """Make an exception of a new class.

    Args:
        draw: Draws the class's base, and what its attributes and methods raise.
        names: The hostile attributes and methods.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise draw.choice([ValueError, KeyError, SystemExit, asyncio.CancelledError])("hostile")

    attributes: dict[str, Any] = {
        name: property(refuse, refuse) if name in ATTRIBUTES else refuse for name in names
    }
    base = draw.choice(BASES)
    # `type` itself, because `with_traceback` and the rest are those of any class.
    error: BaseException = type("HostileError", (base,), attributes)("hostile")
    return error


def draw_hostile(seed: Any) -> BaseException:
    """Make an exception with one to three hostile attributes and methods."""
    draw = random.Random(seed)
    return make_hostile(draw, *draw.sample(ALL, draw.choice([1, 1, 1, 2, 3])))
