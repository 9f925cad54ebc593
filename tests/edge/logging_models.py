"""Models that log; they run in workers."""

import logging
import os
import sys
import warnings
from typing import Any

from fast_batcher import InferenceModel

logger = logging.getLogger("flood")


class Floods(InferenceModel[int, int]):
    """Logs as many records as each input says."""

    def infer(self, inputs: list[int]) -> list[int]:
        for count in inputs:
            for number in range(count):
                logger.warning("record %d of %d", number, count)
        return inputs


class Logs(InferenceModel[str, str]):
    """Logs in every way, while it loads, computes and closes."""

    def __init__(self) -> None:
        logging.getLogger("models.tiny").info("loaded")

    def infer(self, inputs: list[str]) -> list[str]:
        log = logging.getLogger("models.tiny")
        log.debug("not wanted")
        log.info("%d inputs", len(inputs), extra={"tenant": {"id": 7}, "odd": {1}, "model": "?"})
        try:
            raise KeyError("lost key")
        except KeyError:
            log.exception("caught")
        log.error("long " * 20_000)
        logging.getLogger("fast_batcher.models").info("the library's")
        warnings.warn("old argument", stacklevel=1)
        sys.stderr.write("printed\n")
        sys.stderr.flush()
        os.write(2, b"printed natively\n")
        return inputs

    def close(self) -> None:
        logging.getLogger("models.tiny").info("closed")


class NoText:
    """Cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class LogsOddAttributes(InferenceModel[str, str]):
    """Logs each input with an attribute that JSON cannot write."""

    def infer(self, inputs: list[str]) -> list[str]:
        cycle: dict[str, Any] = {}
        cycle["self"] = cycle
        deep: list[Any] = []
        for _ in range(5000):
            deep = [deep]
        attributes = {"cycle": cycle, "deep": deep, "no text": NoText()}
        for value in inputs:
            extra = {"data": attributes[value], "tenant": 7}
            logging.getLogger("models.odd").warning(value, extra=extra)
        return inputs
