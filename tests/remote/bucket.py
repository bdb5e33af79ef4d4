"""An S3 server on loopback: moto's, behind a proxy that counts, and goes wrong when told to."""

from __future__ import annotations

import http.client
import random
import re
import socket
import struct
import threading
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PLAIN = re.compile(r"connection|transfer-encoding|content-length|keep-alive", re.IGNORECASE)


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose `METHOD path` matches.

    Attributes:
        pattern: a regular expression.
        status: answer with it; 0 cuts the line in the middle of the answer, -1 before it.
        times: how often.
        chance: how likely it is for each request.
    """

    pattern: str
    status: int
    times: int = 1
    chance: float = 1.0


class Server:
    """moto's server in a thread, and the proxy before it in another."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self.moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str, int]] = []
        self.lock, self.random, self.failed = threading.Lock(), random.Random(0), 0
        self.proxy = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Proxy,), {"server_": self}))
        self.proxy.daemon_threads = True
        self.proxy.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that hangs up
        self.url = f"http://127.0.0.1:{self.proxy.server_port}"

    def __enter__(self) -> Server:
        import logging

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.moto.start()
        self.behind = self.moto.get_host_and_port()
        threading.Thread(target=self.proxy.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.shutdown()
        self.proxy.server_close()
        self.moto.stop()

    @cached_property
    def client(self) -> Any:
        """A client of moto, past the proxy."""
        import boto3

        host, port = self.behind
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)

    def reset(self, bucket: str) -> None:
        """Forget everything, and make a bucket."""
        host, port = self.behind
        line = http.client.HTTPConnection(host, port, timeout=30)
        line.request("POST", "/moto-api/reset", b"", {"Content-Length": "0"})
        assert line.getresponse().status == 200
        self.client.create_bucket(Bucket=bucket)
        self.faults, self.failed = [], 0
        self.log.clear()

    def put(self, folder: Path, place: str) -> None:
        """Put the files of a folder into a bucket: place is BUCKET/FOLDER."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put_one(f"{place}/{path.relative_to(folder)}", path.read_bytes())

    def put_one(self, place: str, content: bytes) -> None:
        """Put an object into a bucket: place is BUCKET/KEY."""
        bucket, _, key = place.partition("/")
        self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def get(self, place: str) -> bytes:
        """An object: place is BUCKET/KEY."""
        bucket, _, key = place.partition("/")
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys in a bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, pattern: str = "GET .") -> int:
        """The bytes that the answers to some requests had."""
        return sum(size for method, path, size in self.log if re.search(pattern, f"{method} {path}"))

    def fault(self, line: str) -> Fault | None:
        """The fault that is due for a request."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, line) and self.random.random() < fault.chance:
                    fault.times -= 1
                    self.failed += 1
                    return fault
        return None


class Proxy(BaseHTTPRequestHandler):
    """One connection."""

    server_: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Be silent."""

    def do_any(self) -> None:
        """Pass a request on, or go wrong."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server_.fault(f"{self.command} {self.path}")
        if fault and fault.status > 0:
            content = b"<Error><Code>Injected</Code></Error>"
            self.send_response(fault.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content)
            return
        if fault and fault.status < 0:
            self.cut()
            return
        line = http.client.HTTPConnection(*self.server_.behind, timeout=60)
        headers = {name: text for name, text in self.headers.items() if name.lower() != "host"}
        host, port = self.server_.behind
        line.request(self.command, self.path, body or None, {**headers, "Host": f"{host}:{port}"})
        answer = line.getresponse()
        content = answer.read()
        self.send_response_only(answer.status)
        for name, text in answer.getheaders():
            if not PLAIN.fullmatch(name):
                self.send_header(name, text)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        with self.server_.lock:
            self.server_.log.append((self.command, self.path, len(content)))
        if fault:
            self.wfile.write(content[: len(content) // 2])
            self.cut()
            return
        self.wfile.write(content)

    def cut(self) -> None:
        """Cut the line."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_any  # noqa: N815  # names that http.server looks for
