"""Shared memory between a parent process and its workers, for large inputs and outputs.

The parent writes inputs into `Slabs`, and the workers read them through `SlabViews` (`inputs`).
Each worker writes outputs with its `OutboxWriter`, and the parent copies them out with an
`OutboxReader` (`outbox`).
"""
