"""Tuning of the C library's heap, which takes large bodies and outputs. API process."""

# Bytes. glibc maps a block above a threshold separately and returns it to the system when it is
# freed, so each large body costs the page faults of its memory again. The threshold follows the
# largest mapped block that was freed, up to 32 MiB, and twice as much may stay free at the end of
# the heap. Source: mallopt(3), M_MMAP_THRESHOLD.
MOST_KEPT = 32 * 2**20 - 2**16


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed large blocks. Takes 10 us.

    After this call bodies of 602 KB cost a server as little as half the CPU (`benchmarks/http.py`).
    The call has no effect where the environment sets glibc's thresholds, or with another C library.
    """
    bytes(MOST_KEPT)  # mapped, never written, and freed at once
