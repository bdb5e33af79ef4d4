"""Folders on a web server: one that lists them by WebDAV is read, one that does not is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import vitruvian


class Plain(SimpleHTTPRequestHandler):
    """Serves files, in ranges, and lists nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        content = path.read_bytes()
        first, _, last = (self.headers.get("Range") or f"bytes=0-{len(content) - 1}")[6:].partition("-")
        piece = content[int(first) : int(last) + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.answered(piece, path)

    def answered(self, piece: bytes, path: Path) -> None:
        self.send_header("Content-Length", str(len(piece)))
        self.send_header("ETag", f'"{path.stat().st_size}"')
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        self.end_headers()
        self.wfile.write(piece)


class WebDav(Plain):
    """Lists files too (RFC 4918)."""

    def do_PROPFIND(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        folder = Path(self.translate_path(self.path))
        if not folder.exists():
            self.send_error(404)
            return
        parts = [self.described(path) for path in [folder, *(folder.iterdir() if folder.is_dir() else ())]]
        body = f'<?xml version="1.0"?><D:multistatus xmlns:D="DAV:">{"".join(parts)}</D:multistatus>'.encode()
        self.send_response(207)
        self.answered(body, folder)

    def described(self, path: Path) -> str:
        about, name = path.stat(), path.relative_to(self.directory)
        kind = "<D:collection/>" if path.is_dir() else ""
        return (
            f"<D:response><D:href>/{name}{'/' if kind else ''}</D:href><D:propstat><D:prop><D:resourcetype>{kind}"
            f"</D:resourcetype><D:getcontentlength>{about.st_size}</D:getcontentlength><D:getetag>"
            f'"{about.st_size}"</D:getetag><D:getlastmodified>{formatdate(about.st_mtime, usegmt=True)}'
            "</D:getlastmodified></D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
        )


@pytest.fixture(params=[WebDav, Plain])
def site(request, model, monkeypatch) -> Iterator[tuple[str, bool]]:
    """The address of a model, and whether the server lists."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = model("llama", "bfloat16")

    def handler(*args: object) -> SimpleHTTPRequestHandler:
        return request.param(*args, directory=str(folder.parent))

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{folder.name}", request.param is WebDav
        server.shutdown()


def test_a_folder_on_a_web_server(site, model, tmp_path):
    address, lists = site
    if lists:
        assert vitruvian.digest(address).digest == vitruvian.digest(model("llama", "bfloat16")).digest
        return
    with pytest.raises(vitruvian.UnsupportedError, match="lists no files: it does not speak WebDAV"):
        vitruvian.open(address)
    with pytest.raises(vitruvian.UsageError, match="can be read, and not written"):
        vitruvian.convert(model("llama", "bfloat16"), f"{address}/out")
