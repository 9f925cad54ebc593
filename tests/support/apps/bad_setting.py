"""Stops at import: the queue of a batcher can't hold a negative number of requests."""

from fastapi import FastAPI

from apps.models import Echo
from fast_batcher import DynBatcher

batcher = DynBatcher(Echo, max_queue_size=-3)
app = FastAPI(lifespan=batcher.lifespan)
