"""The Prefect server of a local run, as a process of its own that ends when the process that started it does.

Run by path: `python -P server_process.py FD`, FD being a listening socket. Standard input is a pipe whose
other end only the parent holds: it closes however the parent ends. On Linux the kernel also sends SIGTERM
when the thread that started us ends, even if another child of the parent has inherited the pipe.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_STOP = 5


def end_with_parent() -> None:
    """Arrange for this process to stop soon after its parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()


def _stop_at_end_of_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_STOP)
    os._exit(1)


def serve(descriptor: int) -> None:
    """Serve Prefect's API and UI on a listening socket until SIGTERM."""
    gc.disable()  # importing Prefect makes millions of objects and no garbage: a quarter of its time
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    gc.freeze()
    gc.enable()
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    end_with_parent()
    serve(int(sys.argv[1]))
