"""Bytes in, bytes out: frames on a socket pair, and what is pickled into them.

`frames` is pure, `codec` pickles, `channel` does the I/O for either side of the process boundary.
"""
