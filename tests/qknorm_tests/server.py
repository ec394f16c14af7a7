"""A local Hub for tests: the endpoints that huggingface_hub's client calls, with faults on demand.

    with Hub() as hub:  # hub.url: HF_ENDPOINT; "hf_writes": a token with write access to `me` and `lab`
        hub.faults.append(Fault("POST .*/commit/", status=503, times=2))

Repositories live in memory. Xet and uploads in parts are not served: clients must have HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from qknorm_tests.hub_calls import ROUTES, Commit, Refused, Repo


@dataclass
class Fault:
    """A fault of the next `times` matching requests: an error, or a cut after some bytes."""

    request: str  # a regular expression on "METHOD path"
    times: int = 1
    status: int | None = None
    cut: int | None = None
    lose_answer: bool = False  # the request is served, and the connection is cut before the answer


class Hub:
    """The server and its repositories; `requests` lists "METHOD path", `received` the uploads of LFS objects."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.created: list[dict[str, Any]] = []  # bodies of repos/create
        self.received: list[tuple[str, int]] = []  # sha256 and bytes of each PUT, whole or cut
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def create(self, repo_id: str, private: bool | None = None, **files: bytes) -> Repo:
        first = Commit("initial commit", {".gitattributes": b"*.safetensors filter=lfs\n", **files})
        self.repos[repo_id] = Repo(private, {"main": [first]})
        return self.repos[repo_id]

    def commits(self, repo_id: str, branch: str = "main") -> list[Commit]:
        """The commits after the initial one."""
        return self.repos[repo_id].branches[branch][1:] if repo_id in self.repos else []

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and re.match(fault.request, request):
                    fault.times -= 1
                    return fault
        return None


class _Cut(Exception):
    """Raised when a fault or the client cuts the connection."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits until the client acknowledges its head

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        self.path_only = unquote(urlsplit(self.path).path)
        fault = self.hub.fault(f"{self.command} {self.path_only}")
        try:
            body = self._body(fault.cut if fault else None)
            answer = self._handled(body, fault.status if fault else None)
            if fault and fault.lose_answer:
                raise _Cut
            self._answer(*answer)
        except _Cut:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _handled(self, body: bytes, status: int | None) -> tuple[int, dict[str, str], Any]:
        try:
            if status:
                raise Refused(status, "a fault")
            for pattern, handle in ROUTES.items():
                if match := re.fullmatch(pattern, f"{self.command} {self.path_only}"):
                    with self.hub.lock:
                        return handle(self, body, **match.groupdict())
            raise Refused(404, f"no such call: {self.command} {self.path_only}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            return refused.status, headers, {"error": refused.message}

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def _chunks(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline() or "-1", 16):
                if size < 0:
                    raise _Cut
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        left = int(self.headers.get("Content-Length", 0))
        while left and (data := self.rfile.read1(min(left, 65536))):
            left -= len(data)
            yield data
        if left:
            raise _Cut

    def _body(self, cut: int | None) -> bytes:
        body = bytearray()
        for data in self._chunks():
            body += data
            if cut is not None and len(body) >= cut:
                self._received(len(body))
                raise _Cut
        self._received(len(body))
        return bytes(body)

    def _received(self, size: int) -> None:
        if self.command == "PUT":
            self.hub.received.append((self.path_only.split("/")[4], size))

    def _answer(self, status: int, headers: dict[str, str], answer: Any) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
