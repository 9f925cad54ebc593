"""The bytes of frames, for tests that speak to one end of a channel themselves."""

from fast_batcher._transport.channels import pack_header


def pack(kind: int, batch_id: int, body: bytes, seconds: float = 0.0) -> bytes:
    """One frame."""
    return pack_header(kind, len(body), batch_id, seconds) + body
