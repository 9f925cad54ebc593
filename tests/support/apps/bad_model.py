"""Stops at start: the model's constructor raises in the worker."""

from fastapi import FastAPI

from apps.models import BreaksOnLoad
from fast_batcher import DynBatcher

batcher = DynBatcher(BreaksOnLoad)
app = FastAPI(lifespan=batcher.lifespan)
