"""A server process of its own that uses a shared batcher, and does what it is told.

Each line of its input is a list of inputs, `["array", size, filling]` among them, and each line of
its output the outcomes: outputs, or the names of errors.
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from waits import LIMIT

from fast_batcher import DynBatcher
from fast_batcher.observing import Observer


def decode(value: Any) -> Any:
    """Make an input of a line's item."""
    if isinstance(value, list) and value[0] == "array":
        return importlib.import_module("numpy").full(value[1], value[2], "uint8")
    return tuple(value) if isinstance(value, list) else value


def make(model: str, options: dict[str, Any], arguments: list[Any]) -> DynBatcher[Any, Any]:
    """The same batcher in every process."""
    if options.pop("grouped", False):
        options["group_by"] = key_of
    return DynBatcher(f"models.{model}", shared="test", model_args=arguments, **options)


def key_of(value: Any) -> Any:
    """Equal keys, whose parts are one object in one process and two in another."""
    return value[0], value[0] if sys.argv[0] == "-c" else "".join([*value[0]])


async def run(model: str, options: dict[str, Any], arguments: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    batcher = make(model, options, arguments)
    batcher.add_observer(Observer())
    async with batcher:
        tell("open")
        while line := await reader.readline():
            calls = [batcher.process_batched(decode(one)) for one in json.loads(line)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            told = [type(one).__name__ if isinstance(one, Exception) else one for one in outcomes]
            tell(told)


def tell(thing: Any) -> None:
    os.write(1, (json.dumps(thing) + "\n").encode())


# The same search path: else it would have a host of its own.
PROGRAM = """\
import asyncio, json, sys
arguments, sys.path[:] = json.loads(sys.argv[1])
import shared_client
asyncio.run(shared_client.run(*arguments))
"""


class Client:
    """The client's process, seen from the test."""

    def __init__(self, *arguments: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps((arguments, sys.path))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def send(self, *inputs: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(inputs) + "\n")
        self._process.stdin.flush()

    async def receive(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT):
            return json.loads(await asyncio.to_thread(self._process.stdout.readline))

    def finish(self) -> None:
        self._process.communicate(timeout=LIMIT)


@contextmanager
def client(*arguments: Any) -> Iterator[Client]:
    """Start the process; it closes its batcher at the end."""
    one = Client(*arguments)
    try:
        yield one
    finally:
        one.finish()
