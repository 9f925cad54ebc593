"""Who is inside `async with batcher` or a lifespan of it. API process, the event loop's thread."""

import asyncio
from dataclasses import dataclass


@dataclass(eq=False)
class Owner:
    """One `async with` block or lifespan that has been entered and not left."""

    loop: asyncio.AbstractEventLoop
    # Whether the batcher has not been ended since.
    is_current: bool = True


class Owners:
    """Counts owners, so that the last one that leaves closes the batcher.

    An end that one of them, or another caller, orders ends the batcher for all: the others then
    leave without effect.
    """

    def __init__(self) -> None:
        self._owners: list[Owner] = []

    def note_end(self) -> None:
        """The batcher has been ended: owners that entered before leave without effect."""
        for owner in self._owners:
            owner.is_current = False

    def enter(self, loop: asyncio.AbstractEventLoop) -> Owner:
        """Add an owner."""
        # A loop that was closed inside of `async with` never ran the end of the block.
        self._owners = [one for one in self._owners if not one.loop.is_closed()]
        self._owners.append(Owner(loop))
        return self._owners[-1]

    def remove(self, owner: Owner) -> None:
        """Remove an owner whose block was not entered after all."""
        self._owners.remove(owner)

    def leave(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Remove an owner of this loop.

        Returns:
            Whether the batcher is to be closed: the owner was the last one, or there was none.
        """
        # Which of the loop's owners makes no difference, if those of earlier openings go first.
        owners = [one for one in self._owners if one.loop is loop]
        if not owners:
            return True
        owner = min(owners, key=lambda one: one.is_current)
        self._owners.remove(owner)
        return owner.is_current and not self.is_owned()

    def is_owned(self) -> bool:
        """Whether an owner is inside, on a loop that still can leave."""
        return any(one.is_current and not one.loop.is_closed() for one in self._owners)
