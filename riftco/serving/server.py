"""Running the HTTP service on uvicorn: in the foreground until a signal, or in the background of a block."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, current_thread, main_thread
from time import sleep

import uvicorn

from artifacts import ModelBundle
from riftco.config import ServingConfig
from riftco.serving.http import create_app
from riftco.serving.protocol import ServingProtocol
from riftco.serving.service import ModelService

_DRAIN_SECONDS = 60


def serve(
    bundle: ModelBundle | str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServingConfig | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a bundle, or the file of one, until SIGINT or SIGTERM; requests in progress are finished.

    Port 0 takes a free one; `ready` is called with the server's URL once it listens. TypeError or ValueError
    for a port outside 0...65535, OSError when the address cannot be bound, errors of the bundle as it loads.
    """
    with _listen(host, port) as listener:
        loaded = bundle if isinstance(bundle, ModelBundle) else ModelBundle.load(bundle)
        with ModelService(loaded, config) as service:
            server = _server(service, host)
            with _signals_stop(server):
                if ready is not None:
                    ready(_url(host, listener))
                server.run([listener])


@contextmanager
def background_server(service: ModelService, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve from a thread for the length of a `with` block, which gets the URL; the service stays open."""
    with _listen(host, port) as listener:
        server = _server(service, host)
        thread = Thread(target=server.run, args=([listener],), name="riftco-serving", daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                sleep(0.005)
            yield _url(host, listener)
        finally:
            server.should_exit = True
            thread.join()


def _server(service: ModelService, host: str) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            create_app(service, host=host),
            http=ServingProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; binding it ourselves tells the port at once and leaves errors to the caller."""
    if type(port) is not int:
        raise TypeError(f"port must be an integer, got {port!r}")
    if not 0 <= port <= 65_535:
        raise ValueError(f"port must be between 0 and 65535, got {port}")
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _signals_stop(server: uvicorn.Server) -> Iterator[None]:
    """Let SIGINT and SIGTERM end `server` and nothing else.

    Uvicorn raises a captured signal again after its shutdown, which would kill the process before the
    service is closed; with its own handler installed around it, that second time is harmless.
    """
    if current_thread() is not main_thread():
        yield
        return
    previous = {kind: signal.signal(kind, server.handle_exit) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
