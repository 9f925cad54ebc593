"""A detector of speech behind FastAPI: each connection is a session. Runs in the API process.

Start it with `uvicorn examples.sessions.app:app`; see the README beside this file.
"""

from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from examples.sessions.detector import FRAME_BYTES, Detector
from fast_batcher import DynBatcher
from fast_batcher.fastapi import health_router, install_exception_handlers, status_router

# The most frames of a batch.
MAX_BATCH_SIZE = 64
# Seconds for the answer to a frame, and without a frame until a connection loses its place.
TIMEOUT, IDLE_TIMEOUT = 5.0, 60.0

batcher = DynBatcher(Detector, max_batch_size=MAX_BATCH_SIZE, timeout=TIMEOUT)
app = FastAPI(title="A detector of speech", lifespan=batcher.lifespan)
# An error of a call closes its WebSocket, with 1013 if a new connection may get an answer.
install_exception_handlers(app)
app.include_router(health_router(batcher))
app.include_router(status_router(batcher))


@app.websocket("/speech")
async def mark(socket: WebSocket) -> None:
    """Answer each frame with the probability that somebody speaks, as JSON."""
    await socket.accept()
    try:
        async with batcher.session(timeout=IDLE_TIMEOUT) as session:
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                frame = message.get("bytes") or b""
                if len(frame) != FRAME_BYTES:
                    await socket.close(1007, f"a message is a frame of {FRAME_BYTES} bytes")
                    break
                await socket.send_json({"speech": await session.process_batched(frame)})
    except WebSocketDisconnect:
        pass  # the client has gone before its answer
