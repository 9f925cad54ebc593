"""What runs in a worker process, on its main thread: load the model, receive, infer, reply.

Nothing in this package imports asyncio or anything that runs in the API process. Start at `main`.
"""
