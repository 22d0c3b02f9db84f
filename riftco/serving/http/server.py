"""Running the HTTP service on uvicorn: in the foreground until a signal, or in the background of a block.

A server that is told to stop goes on listening while it drains, so that `/ready` can say so: no request is
taken any more, those in progress are finished, and what is not finished in time is ended and its client told.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread, current_thread, main_thread
from time import monotonic, sleep

import uvicorn

from riftco.config import ServingConfig
from riftco.serving.http.access import Access
from riftco.serving.http.app import create_app
from riftco.serving.http.limits import TimeLimits
from riftco.serving.http.protocol import ServingProtocol
from riftco.serving.http.request_policy import RefusedError, is_loopback
from riftco.serving.http.shelf import DEFAULT_NAME, Shelf, Source
from riftco.serving.service import ModelService

_CANCEL_SECONDS = 1
_POLL_SECONDS = 0.05
_logger = logging.getLogger("riftco.serving")


def serve(
    bundle: Source | Mapping[str, Source],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServingConfig | None = None,
    ready: Callable[[str], None] | None = None,
    access: Access | None = None,
    limits: TimeLimits | None = None,
    memory_bytes: int | None = None,
) -> None:
    """Serve a bundle, the file of one, or several by name, until SIGINT or SIGTERM; see `Shelf` for several.

    Port 0 takes a free one; `ready` is called with the server's URL once it listens. TypeError or ValueError
    for a port outside 0...65535, for an address open to others without API keys and for a first bundle larger
    than `memory_bytes`, OSError when the address cannot be bound, errors of that bundle as it loads.
    """
    sources = bundle if isinstance(bundle, Mapping) else {DEFAULT_NAME: bundle}
    limits = limits if limits is not None else TimeLimits()
    with _listen(host, port, access) as listener:
        shelf = Shelf(sources, config, memory_bytes=memory_bytes)
        try:
            shelf.acquire()
        except RefusedError as error:  # there is no client yet whom a refusal would tell anything
            raise ValueError(error.refusal.detail) from None
        shelf.release()
        server = _Server(shelf, host, access, limits)
        try:
            with _signals_stop(server):
                if ready is not None:
                    ready(_url(host, listener))
                server.run([listener])
        finally:
            _close(shelf, limits.drain)


@contextmanager
def background_server(
    models: ModelService | Shelf,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    access: Access | None = None,
    limits: TimeLimits | None = None,
) -> Iterator[str]:
    """Serve from a thread for the length of a `with` block, which gets the URL; the models stay open."""
    with _listen(host, port, access) as listener:
        server = _Server(models, host, access, limits)
        thread = Thread(target=server.run, args=([listener],), name="riftco-serving", daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                sleep(0.005)
            yield _url(host, listener)
        finally:
            server.should_exit = True
            thread.join()


class _Server(uvicorn.Server):
    """Uvicorn over our application, except that it drains before it shuts down."""

    def __init__(
        self, models: ModelService | Shelf, host: str, access: Access | None, limits: TimeLimits | None
    ) -> None:
        self._shelf = models if isinstance(models, Shelf) else Shelf.of(models)
        app = create_app(self._shelf, host=host, access=access, limits=limits)
        self._progress, self._drain_seconds = app.state.progress, app.state.time_limits.drain
        super().__init__(
            uvicorn.Config(
                app,
                http=ServingProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_CANCEL_SECONDS,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what is in progress, for as long as that may take, then close."""
        self._progress.draining = True
        end = monotonic() + self._drain_seconds
        while self._progress.running and monotonic() < end and not self.force_exit:
            await asyncio.sleep(_POLL_SECONDS)
        end = monotonic() + _CANCEL_SECONDS
        while self._progress.running and monotonic() < end:
            self._shelf.cancel_requests()  # again: some come to their engine only now
            await asyncio.sleep(_POLL_SECONDS)
        await super().shutdown(sockets)


def _close(shelf: Shelf, seconds: float) -> None:
    """Unload the models, unless an engine hangs: then the process must end all the same."""
    closing = Thread(target=shelf.close, name="riftco-closing", daemon=True)
    closing.start()
    closing.join(seconds)
    if closing.is_alive():
        _logger.error("an engine did not stop within %g seconds; leaving it", seconds)


def _listen(host: str, port: int, access: Access | None) -> socket.socket:
    """A listening socket; binding it ourselves tells the port at once and leaves errors to the caller."""
    if not is_loopback(host) and not (access and access.keys):
        raise ValueError(
            f"{host} can be reached by others and there are no API keys; make one with "
            "`riftco key NAME --file FILE` and serve with `--keys FILE`, or listen on 127.0.0.1"
        )
    if type(port) is not int:
        raise TypeError(f"port must be an integer, got {port!r}")
    if not 0 <= port <= 65_535:
        raise ValueError(f"port must be between 0 and 65535, got {port}")
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    # Connections inherit it; asyncio sets it for none of these, and a kept one would wait 40 ms an answer.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


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
