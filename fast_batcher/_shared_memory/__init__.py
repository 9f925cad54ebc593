"""Shared memory between the API process and its workers, for large inputs and outputs.

The API process writes inputs into `Slabs`, and the workers read them through `SlabViews`
(`inputs`). Each worker writes outputs with its `OutboxWriter`, and the API process copies them out
with an `OutboxReader` (`outbox`).
"""
