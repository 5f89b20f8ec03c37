"""Object storage: all objects below a prefix, or one GGUF object.

boto3 finds credentials, region and endpoint.
"""

import base64
import contextlib
import hashlib
import importlib
import re
from collections.abc import Generator, Iterator, Sequence
from typing import IO, Any, cast
from urllib.parse import urlsplit

from penstock.weight_cache.source import (
    FILES_MAX,
    Digest,
    Listing,
    RemoteFile,
    SourceError,
    SourceUnreachable,
    is_wanted,
)

_PLAIN_ETAG = re.compile(r"[0-9a-f]{32}")
_NOT_THERE = frozenset(
    {"NoSuchBucket", "NoSuchKey", "AccessDenied", "403", "404", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
)


class S3Source:
    """A prefix of a bucket, or one object."""

    def __init__(self, url: str, patterns: Sequence[str]) -> None:
        at = urlsplit(url)
        self.name, self._bucket, self._prefix = url.rstrip("/"), at.netloc, at.path.strip("/")
        self._patterns = tuple(patterns)
        self._etags: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        try:
            boto3 = cast(Any, importlib.import_module("boto3"))
            self._errors = cast(Any, importlib.import_module("botocore.exceptions"))
        except ImportError as error:
            raise SourceError("it needs the extra `s3` (pip install 'penstock[s3]')") from error
        try:
            self._client = boto3.client("s3")
        except self._errors.BotoCoreError as error:
            raise SourceError(str(error)) from error

    def listing(self) -> Listing:
        """See `Source`."""
        with self._asked():
            files = tuple(self._files())
        if not files:
            raise SourceError("there is no object of a model below it")
        known = hashlib.blake2b(digest_size=20)
        for file in files:
            known.update(f"{file.name}\0{file.size}\0{self._etags[file.name]}\n".encode())
        return Listing(known.hexdigest(), files)

    @contextlib.contextmanager
    def open(self, file: RemoteFile, offset: int) -> Generator[tuple[IO[bytes], int]]:
        """See `Source`."""
        which: dict[str, Any] = {"Bucket": self._bucket, "Key": self._keys[file.name]}
        if self._etags[file.name]:
            which["IfMatch"] = self._etags[file.name]
        if offset:
            which["Range"] = f"bytes={offset}-"
        with self._asked():
            answer = self._client.get_object(**which)
            begins = offset if offset and "ContentRange" in answer else 0
            with contextlib.closing(answer["Body"]) as body:
                yield body, begins

    def _files(self) -> Iterator[RemoteFile]:
        for key, size in sorted(self._objects()):
            name = key.rpartition("/")[2] if key == self._prefix else key[len(self._prefix) :].lstrip("/")
            if not is_wanted(name.lower(), self._patterns):
                continue
            head = self._client.head_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED")
            self._keys[name], self._etags[name] = key, str(head.get("ETag", ""))
            yield RemoteFile(name, size, _digest(head))

    def _objects(self) -> Iterator[tuple[str, int]]:
        pages = self._client.get_paginator("list_objects_v2")
        count = 0
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
            for each in page.get("Contents", ()):
                key = str(each["Key"])
                # A prefix is a folder: `lora/fr` is not the beginning of `lora/french`.
                if key == self._prefix or not self._prefix or key.startswith(f"{self._prefix}/"):
                    count += 1
                    if count > FILES_MAX:
                        raise SourceError(f"it has more than {FILES_MAX} objects")
                    yield key, int(each["Size"])

    @contextlib.contextmanager
    def _asked(self) -> Generator[None]:
        """boto3's errors as the cache's."""
        errors = self._errors
        try:
            yield
        except errors.ClientError as error:
            is_final = str(error.response.get("Error", {}).get("Code", "")) in _NOT_THERE
            raise (SourceError if is_final else SourceUnreachable)(str(error)) from error
        except errors.NoCredentialsError as error:
            raise SourceError(str(error)) from error
        except (errors.BotoCoreError, errors.HTTPClientError) as error:
            raise SourceUnreachable(str(error)) from error


def _digest(head: dict[str, Any]) -> Digest | None:
    """The strongest that the store has of the whole object; an ETag is one where it was put in one piece."""
    sha256 = head.get("ChecksumSHA256")
    if sha256 and head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in sha256:
        return Digest("sha256", base64.b64decode(sha256).hex())
    etag = str(head.get("ETag", "")).strip('"').lower()
    is_encrypted = "kms" in str(head.get("ServerSideEncryption", "")) or "SSECustomerAlgorithm" in head
    return Digest("md5", etag) if _PLAIN_ETAG.fullmatch(etag) and not is_encrypted else None
