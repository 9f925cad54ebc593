"""Sends requests to the host. API process, on the event loop's thread."""

import math
from typing import Any

from fast_batcher._core.values import Group, Phase, Request
from fast_batcher._host.inputs import HostInputs
from fast_batcher._host.link import HostLink
from fast_batcher._host.protocol import FRAME_SIZE, MOST_IN_FRAME, pack_key, pack_options
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.pickling import dump_atoms, dumps, one_line
from fast_batcher.errors import BatcherError, ConfigurationError

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_SENT = Phase.SENT


class CallSender:
    """Packs requests into frames, and keeps account of the room in the host's queue.

    Args:
        link: The connection to the host.
        inputs: Packs the inputs.
        room: Requests for which an empty queue has room.
    """

    def __init__(self, link: HostLink, inputs: HostInputs, room: int) -> None:
        self._link = link
        self._inputs = inputs
        # Requests for which the host's queue has room, as far as is known.
        self.room = room
        # Requests that this host was sent.
        self._sent = 0

    def begin(self, room: int) -> None:
        """Begin to send to a new host, whose queue has room for `room` requests."""
        self.room, self._sent = room, 0

    def note_room(self, room: int, received: int) -> None:
        """Note the room that the host had left after it had received so many requests."""
        self.room = room - (self._sent - received)

    def send(self, requests: list[Request]) -> list[tuple[Request, BatcherError]]:
        """Send requests; return those whose input cannot be sent, with the errors."""
        unsendable: list[tuple[Request, BatcherError]] = []
        for begin in range(0, len(requests), MOST_IN_FRAME):
            unsendable += self._send_some(requests[begin : begin + MOST_IN_FRAME])
        return unsendable

    def _send_some(self, requests: list[Request]) -> list[tuple[Request, BatcherError]]:
        """Send requests: in one frame if their inputs are small."""
        body = dump_atoms([request.value for request in requests], FRAME_SIZE)
        if body is not None:
            self._send_frame(Kind.CALLS, requests, body)
            return []
        unsendable: list[tuple[Request, BatcherError]] = []
        sent: list[Request] = []
        packed: list[Any] = []
        size = 0
        for request in requests:
            item = self._inputs.pack(request)
            if isinstance(item, BatcherError):
                unsendable.append((request, item))
                continue
            sent.append(request)
            packed.append(item)
            size += len(item) if isinstance(item, bytes) else 0
            if size >= FRAME_SIZE:
                self._send_frame(Kind.ITEM_CALLS, sent, packed)
                sent, packed, size = [], [], 0
        if sent:
            self._send_frame(Kind.ITEM_CALLS, sent, packed)
        return unsendable

    def _send_frame(self, kind: Kind, requests: list[Request], inputs: Any) -> None:
        for request in requests:
            request.phase = _SENT
        self._sent += len(requests)
        self.room -= len(requests)
        ids = [request.id for request in requests]
        self._link.send(kind, dumps((ids, inputs, pack_options(requests))))


def keep_deadline(request: Request, max_latency: float | None) -> None:
    """Let the host count from the arrival here, for a request that is sent some time later."""
    if request.losses:  # it is not rejected as late: it was accepted before
        request.target = math.inf
    elif not request.has_explicit_deadline:
        request.target = math.inf if max_latency is None else request.arrival + max_latency


def pack_group(request: Request) -> BatcherError | None:
    """Replace the key of a request's group by bytes; return the error of one without a pickle."""
    if request.group is not None:
        try:
            request.group = Group(pack_key(request.group.key))
        except Exception as error:  # noqa: BLE001  pickling is the user's code
            return ConfigurationError(
                f"group_by returned a {type(request.group.key).__qualname__} that cannot be "
                f"pickled ({one_line(error)}): return a string, a number or a tuple"
            )
    return None
