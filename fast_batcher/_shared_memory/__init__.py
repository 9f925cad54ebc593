"""Shared memory between the API process and its workers, for large inputs and outputs.

The API process writes inputs into `slabs`, and the workers read them through `views`. Each worker
writes outputs with its `outbox_writer`, and the API process copies them out with `outbox_reader`.
"""
