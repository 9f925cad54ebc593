"""A module of an app that configures logging while it is imported, with handlers of its own."""

import logging
from logging.config import dictConfig

from fast_batcher import InferenceModel

dictConfig(
    {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"stderr": {"class": "logging.StreamHandler"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }
)


class Model(InferenceModel[str, str]):
    """Logs its inputs."""

    def infer(self, inputs: list[str]) -> list[str]:
        for value in inputs:
            logging.getLogger("models.set").warning("infer %s", value)
        return inputs
