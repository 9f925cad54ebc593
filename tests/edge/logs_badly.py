"""A module that logs a text that does not fit its values while it is imported."""

import logging

from command_models import Doubler

logger = logging.getLogger("fast_batcher.app")
logger.warning("broken %d", "text")
logger.warning("a warning after it")


class Model(Doubler):
    """Imported after that."""
