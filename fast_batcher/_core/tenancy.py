"""Life of a host process: it ends when no API process needs it. Pure: time is an argument.

    the last API process ...     the host ends ...
    says goodbye                 at once
    vanishes                     after `LINGER`, because the server usually starts another; at once
                                 if the supervisor has ended
    never came                   after `LINGER`

A host that was asked to end (SIGTERM) ends with its last API process, however that leaves.
"""

from math import inf
from typing import Final

# Seconds for which a host without an API process waits for the next. A server replaces a crashed
# process within seconds, and the models need not be loaded again.
LINGER: Final = 30.0


class Tenancy:
    """The API processes of a host.

    Args:
        now: The moment at which the host begins.
    """

    def __init__(self, now: float) -> None:
        self._tenants: set[int] = set()
        self._has_supervisor = True
        self._was_asked_to_end = False
        # The moment at which the host ends while it has no API process.
        self._ends_at = now + LINGER

    @property
    def ends_at(self) -> float:
        """The moment at which the host ends; infinite while it has an API process."""
        return inf if self._tenants else self._ends_at

    def joined(self, tenant: int) -> None:
        """Add an API process."""
        self._tenants.add(tenant)

    def said_goodbye(self, now: float, tenant: int) -> None:
        """Remove an API process that has closed its batcher."""
        self._tenants.discard(tenant)
        self._ends_at = now

    def vanished(self, now: float, tenant: int) -> None:
        """Remove an API process that has died."""
        self._tenants.discard(tenant)
        may_linger = self._has_supervisor and not self._was_asked_to_end
        self._ends_at = now + LINGER if may_linger else now

    def supervisor_ended(self, now: float) -> None:
        """Note that no further API process will come."""
        self._has_supervisor = False
        self._ends_at = min(self._ends_at, now)

    def asked_to_end(self, now: float) -> None:
        """End as soon as there is no API process."""
        self._was_asked_to_end = True
        self._ends_at = min(self._ends_at, now)
