"""The endpoint of `disconnect` as a `JsonEndpoint`."""

from starlette.routing import Route

from apps.disconnect import make_app, pass_gate
from fast_batcher.fastapi import JsonEndpoint

app = make_app()
endpoint = JsonEndpoint(pass_gate, cancel_on_disconnect=True)
app.router.routes.insert(0, Route("/pass", endpoint, methods=["POST"]))
