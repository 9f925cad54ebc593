"""An app whose model waits at a gate while it loads."""

import os

from fastapi import FastAPI

from apps.models import Gated
from fast_batcher import DynBatcher

batcher = DynBatcher(Gated, model_args=(int(os.environ["GATE"]),))
app = FastAPI(lifespan=batcher.lifespan)
