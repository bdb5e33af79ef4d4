"""A small Hub on loopback: it speaks the protocol of huggingface_hub and transformers, and goes wrong when told to.

with Hub(folder) as hub: ...      # hub.endpoint is HF_ENDPOINT, hub.store what it holds, hub.log what was asked
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.routes import ROUTES, Reply
from tests.hub.store import Entry, RefusedError, Repo, Store
from tests.hub.xet import Cas

TOKEN = "hf_of_the_test"
NAMESPACES = ("tester", "acme")
"""Where the token may write."""
PIECE = 1 << 16


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose `METHOD path` matches.

    Attributes:
        pattern: a regular expression.
        status: answer with it,
        xml: and with this, as a storage service does.
        drop_after: cut the line after so many bytes of the body.
        stall: read so many bytes of the body, then wait for an event.
        half: answer, and cut the line in the middle of the file.
        times: how often.
    """

    pattern: str
    status: int = 0
    xml: str = ""
    drop_after: int = -1
    stall: tuple[int, threading.Event] | None = None
    times: int = 1
    half: bool = False


class Hub:
    """The server, in threads of this process."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.multipart = 1 << 40
        """Larger objects are asked for in parts of this size."""
        self.cas: Cas | None = None
        """Where Xet storage is, if there is any."""
        self.ignored = self.altered = ""
        """Files whose names begin so are skipped, as by a .gitignore, or become others in a commit."""
        self.storage = self.expired = 0
        """If not 0, objects are at addresses of their own, numbered on from it; those before `expired` have expired."""
        self.log: list[tuple[str, str, int]] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def asked(self, pattern: str) -> list[tuple[str, int]]:
        """The requests whose `METHOD path` matches, with the bytes of their bodies that came."""
        return [(path, size) for method, path, size in self.log if re.search(pattern, f"{method} {path}")]

    def skips(self, path: str) -> bool:
        """Whether a file is ignored."""
        return bool(self.ignored) and path.startswith(self.ignored)

    def fault(self, line: str) -> Fault | None:
        """The fault that is due for a request."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None


class Server(ThreadingHTTPServer):
    """Remembers what goes wrong in it by itself: the fixture asserts that nothing did."""

    daemon_threads = True
    broken: str = ""

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is no mistake of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            self.broken = traceback.format_exc()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Be silent."""

    def do_any(self) -> None:
        """Find the function that answers, and send what it says."""
        self.url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(self.url.query).items()}
        self.received, self.extra = 0, dict[str, str]()
        try:
            reply = self.answer()
        except RefusedError as error:
            self.drain()
            reply = error.status, {"error": str(error)}
            self.extra = self.extra | {"X-Error-Message": str(error), "X-Error-Code": error.code}
        finally:
            with self.hub.lock:
                self.hub.log.append((self.command, self.path, self.received))
        if reply is not None:
            self.send(*reply)

    def answer(self) -> Reply | None:
        """What the function for this request says, or the fault that is due instead."""
        fault = self.hub.fault(f"{self.command} {self.url.path}")
        self.half = bool(fault and fault.half)
        if fault and fault.half:
            pass
        elif fault and fault.stall:
            self.read_until(fault.stall[0])
            fault.stall[1].wait(100)
        elif fault and fault.drop_after >= 0:
            self.drop(fault.drop_after)
            return None
        elif fault and fault.xml:
            self.drain()
            self.send(fault.status, fault.xml)
            return None
        elif fault:
            raise RefusedError(fault.status, f"the test wants {fault.status}")
        method = "GET" if self.command == "HEAD" else self.command
        for verb, pattern, function in ROUTES:
            match = pattern.fullmatch(self.url.path) if verb == method else None
            if match:
                return function(self, **{name: unquote(value) for name, value in match.groupdict("").items()})
        raise RefusedError(404, f"this Hub has no {self.url.path}")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_any  # noqa: N815  # names that http.server looks for

    def send(self, status: int, value: Any) -> None:
        """Send JSON, or a text that is XML."""
        xml = isinstance(value, str)
        body = value.encode() if xml else json.dumps(value).encode()
        kind = "application/xml" if xml else "application/json"
        self.send_response(status)
        for name, text in {"Content-Type": kind, "Content-Length": str(len(body)), **self.extra}.items():
            if text:
                self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, status: int, headers: dict[str, str], path: Path, first: int, size: int) -> None:
        """Send a range of a file."""
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        with path.open("rb") as reader:
            reader.seek(first)
            if self.half:
                self.wfile.write(reader.read(size // 2))
                self.wfile.flush()
                self.drop(0)
                return
            while size > 0 and (piece := reader.read(min(PIECE, size))):
                self.wfile.write(piece)
                size -= len(piece)

    def pieces(self) -> Iterator[bytes]:
        """The body, whatever way it is sent."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.received += size
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0) - self.received
        while left > 0:
            piece = self.rfile.read(min(PIECE, left))
            if not piece:
                raise ConnectionAbortedError("the client hung up")
            left -= len(piece)
            self.received += len(piece)
            yield piece

    def drain(self) -> None:
        """Read what is left of the body, so that the answer can be read."""
        for _ in self.pieces():
            pass

    def read_until(self, after: int) -> None:
        """Read some bytes of the body, which are lost."""
        for _ in self.pieces():
            if self.received >= after:
                break

    def drop(self, after: int) -> None:
        """Read some bytes of the body and cut the line."""
        self.read_until(after)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(b"".join(self.pieces()) or b"null")

    def save(self, path: Path) -> None:
        """The body as a file."""
        with path.open("wb") as writer:
            for piece in self.pieces():
                writer.write(piece)

    def user(self, namespace: str = "") -> None:
        """Refuse whoever has no token, or may not write there."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token != TOKEN:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        if not token:
            raise RefusedError(401, "Invalid username or password.")
        if namespace and namespace not in NAMESPACES:
            raise RefusedError(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')

    def arrived(self, sha256: str) -> bool:
        """Whether an object came, by LFS or by Xet."""
        store, cas = self.hub.store, self.hub.cas
        if not store.lfs(sha256).exists() and cas is not None:
            path = store.folder / f"{sha256}.xet"
            return cas.fetch(sha256, path) and store.keep(sha256, [path])
        return store.lfs(sha256).exists()

    def repo(self, name: str, write: bool = False) -> Repo:
        """A repository that the caller may see, and change."""
        stored_repo = self.hub.store.repos.get(name)
        if stored_repo is None:
            raise RefusedError(404, "Repository not found", "RepoNotFound")
        if write or stored_repo.private:
            self.user(name.partition("/")[0] if write else "")
        return stored_repo

    def tree(self, name: str, rev: str, write: bool = False) -> tuple[Repo, str, dict[str, Entry]]:
        """A repository, a commit of it and its files."""
        repo = self.repo(name, write)
        oid = repo.resolve(rev)
        if oid is None:
            raise RefusedError(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return repo, oid, repo.commits[oid]
