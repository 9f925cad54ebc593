"""A model for several API processes; it tells who runs it. Worker process of a host."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fast_batcher import InferenceModel
from models.base import pass_gate

logger = logging.getLogger("models.sharing")
# A hundred do not fit into a socket.
LONG = 5_000


class Shared(InferenceModel[Any, Any]):
    """Doubles numbers; for words it does something else.

    Args:
        notes: A folder, where each load notes its host, and whether another host lives that the
            test has not noted as killed.
        gate: Where it waits while it loads, and for each "hold".
    """

    def __init__(self, notes: str, gate: str = "", *, holds_load: bool = False) -> None:
        self._gate = gate
        folder, host = Path(notes), os.getppid()
        others = [path.suffix[1:] for path in folder.glob("host.*")]
        for other in others:
            if (
                int(other) != host
                and _is_alive(int(other))
                and not (folder / f"killed.{other}").exists()
            ):
                (folder / f"two.{other}.{host}").touch()
        (folder / f"host.{host}").touch()
        (folder / f"load.{os.getpid()}").touch()
        logger.warning("model loaded in %s", os.getpid())
        if holds_load:
            pass_gate(gate)

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [self._answer(one) for one in inputs]

    def _answer(self, value: Any) -> Any:
        match value:
            case "host":
                return os.getppid()
            case "hold":
                pass_gate(self._gate)
            case "log":
                logger.warning("once %s", "x" * LONG)
            case _:
                return 2 * value
        return value


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class DoesNotLoad(Shared):
    def __init__(self, notes: str) -> None:
        super().__init__(notes)
        raise FileNotFoundError("no weights at /models/tiny.bin")


class Whereabouts(InferenceModel[None, list[int]]):
    """Answers the host and its worker."""

    def infer(self, inputs: list[None]) -> list[list[int]]:
        return [[os.getppid(), os.getpid()] for _ in inputs]
