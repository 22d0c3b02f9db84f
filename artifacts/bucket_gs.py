"""A bucket of Google Cloud Storage, through the JSON API that gcsfs calls with the user's credentials.

gcsfs tries a request six times with growing pauses, and that cannot be switched off, so only what it does not
try again (a timeout) is tried again here. A write whose answer was lost is thus asked twice, and `create` and
`swap` may find their own bytes: whoever calls them looks. Google's conditions are generations, not ETags.
"""

import base64
import hashlib
import json
import logging
import secrets
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from artifacts.bucket import (
    CHUNK,
    LARGEST_VALUE,
    KeyChanged,
    NoSuchKey,
    Sent,
    damaged_source,
    missing_package,
)
from artifacts.errors import StoreError
from artifacts.retry import Patience, TemporaryError

PART = 64 << 20
"""Objects up to this many bytes go up in one request, larger ones in parts of this size."""

_PIECE = 8 * CHUNK
"""How much of an object one request brings."""


class GoogleBucket:
    """Keys below a `gs://bucket/folder` URL; the version of a value is its generation."""

    def __init__(self, url: str, patience: Patience) -> None:
        """Raises StoreError, code "missing-package", without gcsfs, "remote-denied" without credentials."""
        try:
            from aiohttp import ClientTimeout
            from gcsfs.core import GCSFileSystem  # without the gRPC parts, which store nothing conditionally
        except ImportError as error:
            raise missing_package(url, "gcsfs", "gs") from error
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # what it logs is raised as well
        self._url, self._patience = url, patience
        self._bucket, _, folder = url.removeprefix("gs://").partition("/")
        self._prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        timeout = ClientTimeout(sock_connect=patience.answer_timeout, sock_read=patience.answer_timeout)
        with self._answers():
            self._system = GCSFileSystem(
                skip_instance_cache=True, use_listings_cache=False, requests_timeout=timeout
            )

    def read(self, key: str) -> tuple[bytes, str] | None:
        try:
            about = self._about(key)
            if int(about["size"]) > LARGEST_VALUE:
                message = f"{self._url}/{key} has {about['size']} bytes, too many for what it should be"
                raise StoreError("damaged", f"{message}: remove it and push again")
            _, data = self._call("GET", "b/{}/o/{}", key, alt="media", generation=about["generation"])
        except NoSuchKey:  # gone, or replaced in this moment: then it is asked again by whoever needs it
            return None
        return data, about["generation"]

    def stream(self, key: str, start: int) -> Iterator[bytes]:
        size = int(self._about(key)["size"])
        while start < size:
            span = {"Range": f"bytes={start}-{min(start + _PIECE, size) - 1}"}
            _, data = self._call("GET", "b/{}/o/{}", key, alt="media", headers=span)
            if not data:
                raise TemporaryError("remote-unreachable", f"{self._url} sent nothing of {key}: run again")
            yield data
            start += len(data)

    def create(self, key: str, data: bytes) -> None:
        self._put(key, data, ifGenerationMatch="0")

    def swap(self, key: str, data: bytes, version: str) -> None:
        self._put(key, data, ifGenerationMatch=version)

    def write(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        path = self._system.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        # "multipart", which real and emulated servers check conditions for
        about = json.dumps({"name": self._prefix + key}).encode()
        boundary = secrets.token_hex(16).encode()
        parts = ((b"application/json", about), (b"application/octet-stream", data))
        body = b"".join(b"--%b\nContent-Type: %b\n\n%b\n" % (boundary, *part) for part in parts)
        headers = {"Content-Type": f"multipart/related; boundary={boundary.decode()}"}
        query = {"uploadType": "multipart", **condition}
        try:
            answer = self._call(
                "POST", path, headers=headers, data=body + b"--%b--" % boundary, json_out=True, **query
            )
        except NoSuchKey as error:
            raise self._no_bucket() from error
        if answer["md5Hash"] != base64.b64encode(hashlib.md5(data).digest()).decode("ascii"):
            raise StoreError("damaged", f"{self._url} received other bytes for {key}: run again")

    def upload(self, key: str, path: Path, digest: str, sent: Sent) -> None:
        size = path.stat().st_size
        if size > PART:
            with path.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                    raise damaged_source(path, digest)
            place = f"{self._bucket}/{self._prefix}{key}"
            with self._answers():
                self._system.put_file(str(path), place, consistency="md5", chunksize=PART)
        else:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise damaged_source(path, digest)
            self._put(key, data)
        sent(size)

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        token = None
        while True:
            query = {"prefix": self._prefix + prefix, "pageToken": token}
            try:
                page = self._call("GET", "b/{}/o", json_out=True, **query)
            except NoSuchKey as error:
                raise self._no_bucket() from error
            for item in page.get("items", ()):
                yield item["name"].removeprefix(self._prefix), int(item["size"])
            token = page.get("nextPageToken")
            if not token:
                return

    def remove(self, key: str) -> None:
        with suppress(NoSuchKey):
            self._call("DELETE", "b/{}/o/{}", key)

    def keep(self, keys: Collection[str]) -> list[str]:
        return []  # nobody collects garbage here

    def writers_lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _no_bucket(self) -> StoreError:
        return StoreError("no-bucket", f"{self._url}: there is no bucket {self._bucket!r}: create it first")

    def _about(self, key: str) -> dict[str, Any]:
        return self._call("GET", "b/{}/o/{}", key, json_out=True)

    def _call(self, method: str, path: str, key: str | None = None, **arguments: Any) -> Any:
        places = [self._bucket] if key is None else [self._bucket, self._prefix + key]

        def once() -> Any:
            with self._answers():
                return self._system.call(method, path, *places, **arguments)

        return self._patience.retry(once)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Whatever gcsfs raises becomes StoreError, TemporaryError, NoSuchKey or KeyChanged."""
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except FileNotFoundError as error:
            raise NoSuchKey(str(error)) from error
        except FileExistsError as error:
            raise KeyChanged(str(error)) from error
        except TimeoutError as error:
            message = f"{self._url} did not answer in {self._patience.answer_timeout} s: run again"
            raise TemporaryError("remote-unreachable", message) from error
        except GoogleAuthError as error:
            message = f"{self._url}: {error}: run `gcloud auth application-default login`"
            raise StoreError("remote-denied", message) from error
        except HttpError as error:
            code = "remote-denied" if error.code in (401, 403) else "remote"
            raise StoreError(code, f"{self._url} refused: {error}") from error
        except (
            Exception
        ) as error:  # gcsfs raises those of requests, aiohttp and its own, and bare OSError for 403
            denied = str(error).startswith("Forbidden")
            code = "remote-denied" if denied else "remote-unreachable"
            raise StoreError(code, f"{self._url}: {error!r}: check network and permissions") from error
