"""The HTTP service: who may ask, the original's routes and OpenAI's, the chat page, uvicorn."""

from riftco.serving.http.access import Access, new_key
from riftco.serving.http.app import create_app
from riftco.serving.http.limits import TimeLimits
from riftco.serving.http.server import background_server, serve
from riftco.serving.http.shelf import Shelf

__all__ = ["Access", "Shelf", "TimeLimits", "background_server", "create_app", "new_key", "serve"]
