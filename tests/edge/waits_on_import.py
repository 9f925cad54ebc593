"""A module whose import takes until it is told to go on."""

import os

from models.base import pass_gate

pass_gate(os.environ["GATE"])
