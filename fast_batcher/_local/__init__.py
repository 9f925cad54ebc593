"""Batching inside the program's own process: the implementation of the decorators.

    caller on an event loop --> LoopCalls (calls of one turn) --.
    caller that blocks its thread ------------------------------+--> FunctionOpening
         ^                                                            (Scheduler)
         |                                                                 |
         +--- LoopCalls: one wake-up per batch <--- Ledger <--- thread or task

`LocalBatcher` makes openings on demand: one with a thread, or one per event loop if an async
function runs on the loop of its callers.
"""
