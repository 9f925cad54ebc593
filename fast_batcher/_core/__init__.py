"""The pure core: which requests leave as a batch, when, and to which worker.

Rules of this package: time is an argument, in seconds of any monotonic clock; no code here waits,
sends, logs or reads a clock; every decision is a value that the caller carries out. So the same
code runs under an event loop, under a thread and in virtual time, and a test is a list of calls.

    submit, cancel, worker_ready, worker_lost, batch_done  ->  Scheduler  ->  poll: actions, wake_at
"""
