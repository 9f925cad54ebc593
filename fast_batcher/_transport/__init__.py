"""Bytes in, bytes out: frames on a pair of pipes, and what is pickled into them.

`frames` is pure, `codec` pickles, `channel` does the I/O for either side of the process boundary.
"""
