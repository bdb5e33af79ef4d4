"""A repository of the Hub at one commit, read by ranges.

Facts (huggingface_hub 2.4.0, file_download.py): resolve/COMMIT/PATH answers with the commit (X-Repo-Commit) and the
hash of the content (X-Linked-Etag, else ETag: SHA-256 of an LFS file, git's hash of any other), and redirects to a
signed address that expires. The token is sent to the Hub alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

from converters.remote.object_store import changed
from converters.remote.retries import RetryError, is_transient, with_retries
from converters.remote.store import Entry
from formats.errors import NetworkError, SourceError, UsageError, VitruvianError

LOGIN = "hf auth login   # or set HF_TOKEN, and accept the model's terms on its page"
SECONDS = 30
"""Seconds without a byte after which a request is repeated."""
LIBRARIES = ("httpx2", "httpx", "requests", "urllib3", "httpcore", "httpcore2")
"""The network libraries of huggingface_hub: their errors are network errors."""
GIT = ".gitattributes"
"""A file of git that every repository has, and that is not listed."""
FIRST = 4
"""Tries of the first request for a repository: the name of a folder that does not exist looks like one on the Hub."""
Result = TypeVar("Result")


class Repo:
    """A repository at the commit that its revision has at the first access."""

    def __init__(self, name: str, revision: str | None) -> None:
        self.name, self.revision = name, revision
        self.url = f"hf://{name}{f'@{revision}' if revision else ''}"
        self.places: dict[str, str] = {}
        self.lock = threading.Lock()

    @cached_property
    def commit(self) -> str:
        """The commit of the revision."""
        info = self.ask(lambda api: api.model_info(self.name, revision=self.revision, timeout=SECONDS), FIRST)
        return str(info.sha)

    @cached_property
    def tree(self) -> dict[str, Entry]:
        """Every file of the commit, by path."""
        items = self.ask(lambda api: list(api.list_repo_tree(self.name, recursive=True, revision=self.commit)))
        files = [entry for entry in items if hasattr(entry, "size")]
        files = [entry for entry in files if entry.path != GIT]
        return {entry.path: Entry(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id) for entry in files}

    def list_folder(self, folder: str) -> dict[str, Entry | None]:
        """The entries of a folder (`Store`)."""
        entries: dict[str, Entry | None] = {}
        for path, entry in self.tree.items():
            inside = path if not folder else path.removeprefix(f"{folder}/")
            if folder and inside == path:
                continue
            name, _, deeper = inside.partition("/")
            entries[name] = None if deeper else entry
        return entries

    def stat(self, key: str) -> Entry | None:
        """The entry of a file (`Store`)."""
        return self.tree.get(key)

    def fetch(self, key: str, entry: Entry, start: int, stop: int) -> memoryview:
        """Bytes of a file (`Store`)."""
        return with_retries(f"{self.url}/{key}", lambda: self._fetch(key, entry, start, stop))

    def _fetch(self, key: str, entry: Entry, start: int, stop: int) -> memoryview:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # as in converters.hub

        place = self._place(key, entry)
        home = urlsplit(place).netloc == urlsplit(self._api.endpoint).netloc
        headers = build_hf_headers() if home else {}
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        answer = self._meant(lambda: get_session().get(place, headers=headers, timeout=SECONDS))
        if answer.status_code in (206, 200) and (start, stop) == (0, entry.size) and len(answer.content) == entry.size:
            return memoryview(answer.content)
        content_range = answer.headers.get("Content-Range", "")
        if answer.status_code == 206 and content_range == f"bytes {start}-{stop - 1}/{entry.size}":
            if len(answer.content) != stop - start:
                raise RetryError(f"{len(answer.content)} bytes of {stop - start} came")
            return memoryview(answer.content)
        with self.lock:
            self.places.pop(key, None)  # the signed address has expired, or the token
        if answer.status_code in (206, 416):
            raise changed(self.url, key)
        if answer.status_code == 200:
            raise NetworkError(f"{self.url}/{key} is not served by ranges", "download it: hf download " + self.name)
        if home and not is_transient(answer.status_code):
            raise self._refused(answer.status_code)
        raise RetryError(f"the Hub answers {answer.status_code}", pause_of(answer.headers))

    def _place(self, key: str, entry: Entry) -> str:
        """The address of a file's bytes.

        Raises:
            SourceError: the file is not the one that the commit had when it was listed.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        with self.lock:
            place = self.places.get(key)
        if place is not None:
            return place
        address = hf_hub_url(self.name, key, revision=self.commit, endpoint=self._api.endpoint)
        metadata = self._meant(lambda: get_hf_file_metadata(address, timeout=SECONDS))
        if (
            metadata.etag != entry.identity
            or metadata.size not in (None, entry.size)
            or metadata.commit_hash != self.commit
        ):
            raise changed(self.url, key)
        with self.lock:
            self.places[key] = metadata.location
        return metadata.location

    @cached_property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        if "HF_HUB_VERBOSITY" not in os.environ:
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each of its own retries
        return HfApi(library_name="vitruvian")

    def ask(self, act: Callable[[Any], Result], tries: int | None = None) -> Result:
        """Send a request to the Hub, repeated up to `tries` times (`with_retries`)."""
        return with_retries(self.url, lambda: self._meant(lambda: act(self._api)), tries)

    def _meant(self, act: Callable[[], Result]) -> Result:
        """Call a function, and turn known errors of huggingface_hub into errors for the user."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            return act()
        except OfflineModeIsEnabled:
            raise offline(self.url) from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            if is_transient(status):
                raise RetryError(f"the Hub answers {status}", pause_of(error.response.headers)) from None
            raise self._refused(status) from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] in LIBRARIES or isinstance(error, OSError):
                raise RetryError(f"{type(error).__name__} {error}") from None
            raise

    def _refused(self, status: int) -> VitruvianError:
        if status == 404:
            return SourceError(f"{self.url} is not on the Hub, or not for this token (404)", LOGIN)
        return UsageError(f"the Hub does not give {self.url} to this token ({status})", LOGIN)


def offline(url: str) -> SourceError:
    """The error for a name that would have to be read from the Hub in offline mode."""
    return SourceError(f"{url} would have to be read from the Hub, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")


def pause_of(headers: Any) -> float:
    """The seconds in a server's Retry-After header, 0 without one."""
    seconds = str(headers.get("Retry-After") or "")
    return float(seconds) if seconds.isdigit() else 0.0
