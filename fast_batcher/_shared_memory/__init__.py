"""Memory that the API process and its workers share, for inputs and outputs that are large.

The API process writes inputs into `slabs`, and the workers read them through `views`. Each worker
writes outputs with its `outbox_writer`, and the API process copies them out with `outbox_reader`.
"""
