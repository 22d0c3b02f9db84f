"""A bucket of S3 or of a service that speaks its protocol, through the client that s3fs configures.

The client's own methods are called, not s3fs's files: only they take the conditions of a write, and s3fs and
botocore would each try again in silence. Here one loop tries again, `Patience`. The HTTP library below may
still repeat a request if an idle connection turns out to be closed, which looks like a lost answer: `create`
and `swap` may find their own bytes, and whoever calls them looks.

Uploads carry the SHA-256 of what they should be, so a server that checks it refuses bytes that changed on the
way. Credentials, region and endpoint come from where botocore looks for them (AWS_ENDPOINT_URL and the like).
"""

import base64
import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

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
"""Objects up to this many bytes go up in one request, larger ones in parts of this size, one at a time."""

_TEMPORARY = {
    "BadDigest",
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}

_STALE = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
"""Answered with status 400 to credentials that were good once."""


class S3Bucket:
    """Keys below an `s3://bucket/folder` URL; the version of a value is its ETag."""

    def __init__(self, url: str, patience: Patience) -> None:
        """Raises StoreError, code "missing-package", without s3fs; nothing is sent yet."""
        try:
            from fsspec.asyn import sync
            from s3fs import S3FileSystem
        except ImportError as error:
            raise missing_package(url, "s3fs", "s3") from error
        self._url, self._patience, self._sync = url, patience, sync
        self._bucket, _, folder = url.removeprefix("s3://").partition("/")
        self._prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        self._system = S3FileSystem(
            skip_instance_cache=True,  # the environment may have changed since another was made
            config_kwargs={
                "retries": {"total_max_attempts": 1},
                "connect_timeout": patience.answer_timeout,
                "read_timeout": patience.answer_timeout,
                "request_checksum_calculation": "when_required",  # we bring our own
                "response_checksum_validation": "when_required",
            },
        )

    def read(self, key: str) -> tuple[bytes, str] | None:
        try:
            return self._patience.retry(lambda: self._read(key))
        except NoSuchKey:
            return None

    def _read(self, key: str) -> tuple[bytes, str]:
        answer = self._send("get_object", Key=self._prefix + key)
        body = answer["Body"]
        try:
            size = self._part_of(answer, "ContentLength")
            if size > LARGEST_VALUE:
                message = f"{self._url}/{key} has {size} bytes, too many for what it should be"
                raise StoreError("damaged", f"{message}: remove it and push again")
            with self._answers():
                return self._sync(self._system.loop, body.read), self._part_of(answer, "ETag")
        finally:
            self._close(body)

    def stream(self, key: str, start: int) -> Iterator[bytes]:
        span = {"Range": f"bytes={start}-"} if start else {}
        answer = self._send("get_object", Key=self._prefix + key, **span)
        body = answer["Body"]
        try:
            if start and answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
                raise StoreError(
                    "remote", f"{self._url} does not serve parts of objects: it cannot be resumed"
                )
            while chunk := self._next_chunk(body):
                yield chunk
        finally:
            self._close(body)

    def _next_chunk(self, body: Any) -> bytes:
        with self._answers():
            return self._sync(self._system.loop, body.read, CHUNK)  # raises if fewer came than were announced

    def _close(self, body: Any) -> None:
        self._system.loop.call_soon_threadsafe(body.close)

    def create(self, key: str, data: bytes) -> None:
        self._put(key, data, IfNoneMatch="*")

    def swap(self, key: str, data: bytes, version: str) -> None:
        try:
            self._put(key, data, IfMatch=version)
        except NoSuchKey as error:
            raise KeyChanged(key) from error

    def write(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        digest = _base64(hashlib.sha256(data))
        self._request("put_object", Key=self._prefix + key, Body=data, ChecksumSHA256=digest, **condition)

    def upload(self, key: str, path: Path, digest: str, sent: Sent) -> None:
        size = path.stat().st_size
        with path.open("rb") as stream:
            if size > PART:
                self._upload_parts(key, stream, digest, sent)
                return
            data = stream.read()
        if hashlib.sha256(data).hexdigest() != digest:
            raise damaged_source(path, digest)
        self._put(key, data)
        sent(len(data))

    def _upload_parts(self, key: str, stream: BinaryIO, digest: str, sent: Sent) -> None:
        place = {"Key": self._prefix + key}
        answer = self._request("create_multipart_upload", **place, ChecksumAlgorithm="SHA256")
        place["UploadId"] = self._part_of(answer, "UploadId")
        hasher = hashlib.sha256()
        parts: list[dict[str, Any]] = []
        try:
            while data := stream.read(PART):
                hasher.update(data)
                parts.append(self._upload_part(place, len(parts) + 1, data))
                sent(len(data))
            if hasher.hexdigest() != digest:  # nothing has appeared under the key yet
                raise damaged_source(Path(stream.name), digest)
            self._complete(key, place, parts, stream.tell())
        except BaseException:
            self._abort(place)
            raise

    def _upload_part(self, place: dict[str, str], number: int, data: bytes) -> dict[str, Any]:
        checksum = _base64(hashlib.sha256(data))
        answer = self._request("upload_part", **place, PartNumber=number, Body=data, ChecksumSHA256=checksum)
        return {"PartNumber": number, "ETag": self._part_of(answer, "ETag"), "ChecksumSHA256": checksum}

    def _complete(self, key: str, place: dict[str, str], parts: list[dict[str, Any]], size: int) -> None:
        try:
            self._request("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})
        except NoSuchKey:  # the upload is unknown: a first request completed it and its answer was lost
            if dict(self.sizes(key)).get(key) != size:
                raise StoreError("remote", f"{self._url} lost the upload of {key}: run again") from None

    def _abort(self, place: dict[str, str]) -> None:
        with suppress(StoreError, NoSuchKey):  # what failed before matters more
            self._send("abort_multipart_upload", **place)

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        page: dict[str, str] = {}
        while True:
            answer = self._request("list_objects_v2", Prefix=self._prefix + prefix, **page)
            for item in answer.get("Contents", ()):
                key, size = (self._part_of(item, name) for name in ("Key", "Size"))
                yield key.removeprefix(self._prefix), size
            if not self._part_of(answer, "IsTruncated"):
                return
            page = {"ContinuationToken": self._part_of(answer, "NextContinuationToken")}

    def remove(self, key: str) -> None:
        self._request("delete_object", Key=self._prefix + key)

    def keep(self, keys: Collection[str]) -> list[str]:
        return []  # nobody collects garbage here

    def writers_lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _request(self, method: str, **arguments: Any) -> Any:
        return self._patience.retry(lambda: self._send(method, **arguments))

    def _send(self, method: str, **arguments: Any) -> Any:
        with self._answers():
            call = getattr(self._client(), method)
            return self._sync(self._system.loop, call, Bucket=self._bucket, **arguments)

    def _part_of(self, answer: Mapping[str, Any], name: str) -> Any:
        """A part that S3 always sends; StoreError, code "remote", without it."""
        if name not in answer:
            message = f"{self._url} answers without {name}, which S3 always sends"
            raise StoreError("remote", f"{message}: check AWS_ENDPOINT_URL, or use another service")
        return answer[name]

    def _client(self) -> Any:
        try:
            return self._system.s3
        except ValueError as error:
            raise StoreError("bad-url", f"{self._url}: {error}: mend AWS_ENDPOINT_URL") from error

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Whatever the client raises becomes StoreError, TemporaryError, NoSuchKey or KeyChanged."""
        from aiohttp import ClientError as ConnectionTrouble
        from botocore import exceptions as failure
        from botocore.parsers import ResponseParserError

        lost = (failure.HTTPClientError, failure.IncompleteReadError, ResponseParserError)
        try:
            yield
        except failure.ClientError as error:
            raise self._refusal(error) from error
        except (*lost, failure.ConnectionError, ConnectionTrouble, OSError) as error:
            message = f"{self._url} cannot be reached ({error}): check network and address, then run again"
            raise TemporaryError("remote-unreachable", message) from error
        except (failure.NoCredentialsError, failure.PartialCredentialsError) as error:
            message = f"{self._url}: {error}: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise StoreError("remote-denied", message) from error
        except RecursionError as error:  # botocore asks where the bucket is, and is sent on there as well
            message = f"{self._url} sends on to another region or address without naming it"
            raise StoreError("remote", f"{message}: set AWS_DEFAULT_REGION or AWS_ENDPOINT_URL") from error
        except failure.ParamValidationError as error:
            raise StoreError("bad-url", f"{self._url} names no bucket of S3: {error}") from error
        except failure.BotoCoreError as error:
            raise StoreError("remote", f"{self._url}: {error}") from error

    def _refusal(self, error: Any) -> Exception:
        code = error.response.get("Error", {}).get("Code", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == "NoSuchBucket":
            return StoreError(
                "no-bucket", f"{self._url}: there is no bucket {self._bucket!r}: create it first"
            )
        if status == 404:
            return NoSuchKey(code)
        if status == 412:
            return KeyChanged(code)
        if code in _TEMPORARY or status in (408, 429) or (status >= 500 and status != 501):
            return TemporaryError(
                "remote-unreachable", f"{self._url} is not able to answer ({error}): run again later"
            )
        if code in _STALE:
            return StoreError("remote-denied", f"{self._url} denies access ({error}): sign in again")
        if status in (401, 403):
            return StoreError("remote-denied", f"{self._url} denies access ({error}): check keys and policy")
        if status == 501:
            return StoreError("remote-unsupported", f"{self._url} cannot do this: {error}")
        return StoreError("remote", f"{self._url} refused: {error}")


def _base64(hasher: "hashlib._Hash") -> str:
    return base64.b64encode(hasher.digest()).decode("ascii")
