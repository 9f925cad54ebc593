"""A finding of `doctor`: a name, a level, and a remedy."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "warning", "bad"]


@dataclass(frozen=True)
class Check:
    """A line of the report."""

    # Subject of the check, in a few words.
    name: str
    level: Level
    # Result, and its remedy; the remedy is empty if all is well.
    text: str
    remedy: str = ""
