"""Who is inside `async with batcher` or a lifespan of it. API process, the event loop's thread."""

import asyncio
from typing import NamedTuple


class Owner(NamedTuple):
    """One `async with` block or lifespan that has been entered and not left."""

    loop: asyncio.AbstractEventLoop
    # How often the batcher had been ended before.
    ends: int


class Owners:
    """Counts owners, so that the last one that leaves closes the batcher.

    An end that one of them, or another caller, orders ends the batcher for all: the others then
    leave without effect.
    """

    def __init__(self) -> None:
        self._owners: list[Owner] = []
        self._ends = 0

    def note_end(self) -> None:
        """The batcher has been ended: owners that entered before leave without effect."""
        self._ends += 1

    def enter(self, loop: asyncio.AbstractEventLoop) -> Owner:
        """Add an owner."""
        # A loop that was closed inside of `async with` never ran the end of the block.
        self._owners = [one for one in self._owners if not one.loop.is_closed()]
        owner = Owner(loop, self._ends)
        self._owners.append(owner)
        return owner

    def remove(self, owner: Owner) -> None:
        """Remove an owner whose block was not entered after all."""
        self._owners.remove(owner)

    def renew(self, owner: Owner) -> None:
        """Let an owner count for the batcher as it is now, if it was ended while it entered."""
        if not self.is_current(owner):
            self._owners.remove(owner)
            self._owners.append(Owner(owner.loop, self._ends))

    def leave(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Remove an owner of this loop.

        Returns:
            Whether the batcher is to be closed: the owner was the last one, or there was none.
        """
        # Which of the loop's owners makes no difference, if the oldest goes first.
        owner = next((one for one in self._owners if one.loop is loop), None)
        if owner is None:
            return True
        self._owners.remove(owner)
        return self.is_current(owner) and not self.is_owned()

    def is_current(self, owner: Owner) -> bool:
        """Whether the batcher has not been ended since this owner entered."""
        return owner.ends == self._ends

    def is_owned(self) -> bool:
        """Whether an owner is inside, on a loop that still can leave."""
        return any(self.is_current(one) and not one.loop.is_closed() for one in self._owners)
