"""Code of a worker process: load the model, receive batches, call `infer`, reply. Main thread.

Modules of this package import neither asyncio nor code of the parent. The entry is `main`.
"""
