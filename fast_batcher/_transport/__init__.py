"""Transport between the API process and its workers: frames on a pair of pipes, and pickling.

`frames` is pure, `codec` and `pickler` pickle, `loop_channel` does the I/O of the API process and
`blocking_channel` that of the worker.
"""
