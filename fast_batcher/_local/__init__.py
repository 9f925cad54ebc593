"""Batching inside the program's own process: the implementation of the decorators.

    caller on an event loop --> LoopSubmitter (calls of one turn) --.
    caller that blocks its thread ----------------------------------+--> Engine --> worker
         ^                                                           (Scheduler)   thread or task
         |                                                                |
         +------ deliver: one wake-up per event loop and batch <----------+

`LocalBatcher` makes engines on demand: one engine with a thread, or one per event loop if an async
function runs on the loop of its callers.
"""
