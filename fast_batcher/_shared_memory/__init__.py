"""Memory that the API process and its workers share, for inputs and outputs that are large.

`slabs` is written by the API process and viewed by the workers; `outbox` is written by one worker
and copied out by the API process.
"""
