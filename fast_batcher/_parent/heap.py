"""The C library's heap, where servers gather large bodies. Parent process."""

# Bytes. glibc maps a block above a threshold by itself and gives it back to the system when it is
# freed; so each large body costs the page faults of its memory anew. The threshold follows the
# largest mapped block that was freed, up to 32 MiB, and twice as much may lie free at the end of
# the heap. Source: mallopt(3), M_MMAP_THRESHOLD.
MOST_KEPT = 32 * 2**20 - 2**16


def keep_freed_memory() -> None:
    """Let the C library use the memory of large blocks again. Takes 10 us.

    Bodies of 602 KB cost a server up to half as much CPU after this (`benchmarks/http.py`). It does
    nothing where the environment sets glibc's thresholds, or with another C library.
    """
    bytes(MOST_KEPT)  # mapped, never written, and freed at once
