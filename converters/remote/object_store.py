"""Buckets of S3, Google Cloud and Azure, and web servers with WebDAV listings, through obstore.

obstore (0.12.1) takes keys and endpoints from the usual variables: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and AWS_REGION,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME. Its own retries are off, as `retries.py` retries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from converters.remote.retries import RetryError, is_transient, line, with_retries
from converters.remote.store import Entry
from formats.errors import SourceError, UnsupportedError, UsageError

SCHEMES = ("s3", "gs", "az", "https", "http")
KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Scheme: the hint that names the variables with the store's keys."""
PART, PARTS = 8 << 20, 9_000
"""Least bytes of a part of an upload, and most parts: S3 allows 10,000."""
SENDERS = 4
Result = TypeVar("Result")


class Bucket:
    """A bucket, a container, or a web server."""

    def __init__(self, url: str) -> None:
        if find_spec("obstore") is None:
            raise UnsupportedError(f"{url} needs the package obstore", "pip install 'vitruvian[remote]'")
        self.url, self.scheme = url, url.partition(":")[0]

    @cached_property
    def store(self) -> Any:
        """The store object of obstore.

        Raises:
            UsageError: obstore cannot open the address.
        """
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        addresses = [self.url, *(os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"))]
        options: Any = {"allow_http": True} if any(value.startswith("http://") for value in addresses) else {}
        try:
            return from_url(self.url, client_options=options, retry_config={"max_retries": 0})
        except (BaseError, ValueError, OSError) as error:
            raise UsageError(f"{self.url} cannot be opened: {line(str(error))}", KEYS.get(self.scheme, "")) from None

    def list_folder(self, folder: str) -> dict[str, Entry | None]:
        """The entries of a folder (`Store`)."""
        import obstore

        try:
            answer = self._ask(folder, lambda: obstore.list_with_delimiter(self.store, folder or None))
        except FileNotFoundError:
            return {}
        names: dict[str, Entry | None] = {entry.rpartition("/")[2]: None for entry in answer["common_prefixes"]}
        return names | {
            entry["path"].rpartition("/")[2]: _entry(entry) for entry in answer["objects"] if entry["path"] != folder
        }

    def stat(self, key: str) -> Entry | None:
        """The entry of an object (`Store`)."""
        import obstore

        try:
            return _entry(self._ask(key, lambda: obstore.head(self.store, key)))
        except FileNotFoundError:
            return None

    def fetch(self, key: str, entry: Entry, start: int, stop: int) -> memoryview:
        """Bytes of an object (`Store`)."""
        import obstore
        from obstore.exceptions import PreconditionError

        strong = {"if_match": entry.identity} if entry.identity.startswith('"') else {}
        options: Any = {"range": (start, stop), **strong}

        def get() -> tuple[Any, memoryview]:
            answer = obstore.get(self.store, key, options=options)
            return answer.meta, memoryview(answer.bytes())

        try:
            about, content = self._ask(key, get)
        except (PreconditionError, FileNotFoundError):
            raise changed(self.url, key) from None
        if _entry(about) != entry or len(content) != stop - start:
            raise changed(self.url, key)
        return content

    def send(self, key: str, content: Path | bytes) -> Entry:
        """Upload a file or bytes as an object, in one step: the object has all of the content, or is as before."""
        import obstore

        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        part = max(PART, -(-size // PARTS))
        put = lambda: obstore.put(self.store, key, content, chunk_size=part, max_concurrency=SENDERS)  # noqa: E731
        self._ask(key, put)
        sent = self.stat(key)
        if sent is None or sent.size != size:
            raise SourceError(f"{self.url}/{key} has not the {size} bytes that were sent")
        return sent

    def remove(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        import obstore

        for key in keys:
            self._ask(key, lambda key=key: obstore.delete(self.store, key))  # type: ignore[misc]

    def every(self, folder: str) -> dict[str, Entry]:
        """Every object below a folder, by key."""
        import obstore

        entries = self._ask(folder, lambda: [entry for page in obstore.list(self.store, folder) for entry in page])
        return {entry["path"]: _entry(entry) for entry in entries}

    def _ask(self, key: str, act: Callable[[], Result]) -> Result:
        """Send a request to the store, repeated while it fails for a passing reason (`with_retries`).

        Raises:
            NetworkError: the store does not answer.
            UsageError: the store refuses.
            FileNotFoundError: there is no such object.
            PreconditionError: the object has changed.
        """
        from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

        where = f"{self.url}/{key}".rstrip("/")

        def once() -> Result:
            try:
                return act()
            except (FileNotFoundError, PreconditionError):
                raise
            except (PermissionDeniedError, UnauthenticatedError) as error:
                raise UsageError(f"{where} may not be used: {_message_of(error)}", KEYS.get(self.scheme, "")) from None
            except (BaseError, OSError, ValueError) as error:
                status = re.search(r"status code: (\d{3})", str(error))
                if status and not is_transient(int(status[1])):
                    raise self._refused(where, int(status[1]), _message_of(error)) from None
                raise RetryError(_message_of(error)) from None

        return with_retries(where, once)

    def _refused(self, where: str, status: int, reason: str) -> Exception:
        if self.scheme in ("http", "https") and status in (404, 405, 501):
            return UnsupportedError(
                f"{self.url} lists no files: it does not speak WebDAV ({status})",
                "download the folder first",
            )
        return UsageError(f"{where} is refused: {reason}", KEYS.get(self.scheme, ""))


def changed(url: str, key: str) -> SourceError:
    """The error for an object that has changed since its folder was listed."""
    return SourceError(
        f"{url}/{key} has changed since it was opened, or is gone", "run it again once nothing writes it"
    )


def _entry(about: Mapping[str, Any]) -> Entry:
    return Entry(about["size"], about["e_tag"] or f"{about['last_modified']} {about['size']}")


def _message_of(error: BaseException) -> str:
    """The message of a store's error, as short as possible."""
    text = str(error).partition("\n\nDebug source:")[0]
    code, status = re.search(r"<Code>(.*?)</Code>", text), re.search(r"status code: (\d+ [\w ]+)", text)
    return " ".join(filter(None, (status and status[1], code and code[1]))) or line(text)
