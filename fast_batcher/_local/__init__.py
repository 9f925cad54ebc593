"""Batching inside the program's own process: what stands behind the decorators.

    caller --> LoopShell (the calls of one turn of an event loop) --.
    caller that blocks its thread ----------------------------------+--> Engine --> worker
                                                                    |   (Scheduler)  thread or task
      ^                                                             |                    |
      +------ deliver: one wake-up per event loop and batch <-------+--------------------+

`LocalBatcher` makes these as they are needed: one engine with a thread, or one per event loop where
an async function runs on the loop of its callers.
"""
