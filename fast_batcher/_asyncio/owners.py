"""Reference count of `async with` blocks and lifespans that share a batcher.

API process, the event loop's thread.
"""

import asyncio
from dataclasses import dataclass


@dataclass(eq=False)
class Owner:
    """An `async with` block or lifespan that was entered and not left yet."""

    loop: asyncio.AbstractEventLoop
    # False once the batcher was closed after this owner entered.
    is_current: bool = True


class Owners:
    """Counts owners, so that the last one that leaves closes the batcher.

    `aclose` and `stop` close the batcher for all owners, which then leave without effect.
    """

    def __init__(self) -> None:
        self._owners: list[Owner] = []

    def note_end(self) -> None:
        """Record that the batcher was closed: owners that entered before leave without effect."""
        for owner in self._owners:
            owner.is_current = False

    def enter(self, loop: asyncio.AbstractEventLoop) -> Owner:
        """Add an owner."""
        # Owners on a closed loop will never leave.
        self._owners = [one for one in self._owners if not one.loop.is_closed()]
        self._owners.append(Owner(loop))
        return self._owners[-1]

    def remove(self, owner: Owner) -> None:
        """Remove an owner whose block failed to start."""
        self._owners.remove(owner)

    def leave(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Remove an owner of this loop.

        Returns:
            Whether the batcher must be closed: the owner was the last one, or there was none.
        """
        # Owners of one loop are interchangeable, except that owners of earlier openings go first.
        owners = [one for one in self._owners if one.loop is loop]
        if not owners:
            return True
        owner = min(owners, key=lambda one: one.is_current)
        self._owners.remove(owner)
        return owner.is_current and not self.is_owned()

    def is_owned(self) -> bool:
        """Return whether the present opening has an owner on a loop that is not closed."""
        return any(one.is_current and not one.loop.is_closed() for one in self._owners)
