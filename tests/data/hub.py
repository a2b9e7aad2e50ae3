"""A hub on this machine's loopback that speaks enough of the Hugging Face protocol for the hub's real client.

    with Hub({"org/name": {"data/train-0.parquet": b"..."}}) as hub:
        ... HF_ENDPOINT=hub.url, set before huggingface_hub is imported ...

`hub.faults` is a list of faults for the next requests of a data file's bytes: "" for none, a status such as "500",
"reset" (the connection breaks in the middle of the body), "truncated" (half the body, under a Content-Length that says
so), "short" (half of what Content-Length says) or "stall" (nothing comes for `Hub.stall` seconds).
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Repos = dict[str, dict[str, bytes]]


class Hub:
    """Serves `repos` (files by repository id) at `url` until the `with` block ends."""

    def __init__(self, repos: Repos):
        self.repos = repos
        self.faults: list[str] = []
        self.stall = 2.0  # seconds
        self.refuse: int | None = None  # the status of every answer from now on
        self.requests: list[str] = []
        self.sent = 0  # bytes of bodies
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def commit(self, repo: str) -> str:
        """The one commit that a repository has, under the names `main`, `refs/convert/parquet` and its own."""
        return hashlib.sha1(repo.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(json.loads(body) if body else None)

    def _answer(self, body: dict | None = None) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        path = path.replace("/api/models/", "/api/datasets/")  # a model's files are served as a data set's
        path = path if path.startswith(("/api/", "/datasets/")) else f"/datasets{path}"
        if self.hub.refuse:
            return self._send(self.hub.refuse, b"no", {})
        known = next((r for r in self.hub.repos if re.match(rf"(/api)?/datasets/{re.escape(r)}(/|$)", path)), None)
        if known is None:
            return self._refuse("RepoNotFound", 401 if path.startswith("/api") else 404)
        commit, files = self.hub.commit(known), self.hub.repos[known]
        rest = path.split(f"/datasets/{known}", 1)[1]
        for revision in (commit, "main", "refs/convert/parquet"):
            if path.startswith("/api"):
                if rest in ("", f"/revision/{revision}"):
                    return self._json({"id": known, "sha": commit, "siblings": [{"rfilename": f} for f in files]})
                if rest == f"/tree/{revision}" or rest.startswith(f"/tree/{revision}/"):
                    return self._tree(files, rest.removeprefix(f"/tree/{revision}").strip("/"))
                if rest == f"/paths-info/{revision}":
                    wanted = body.get("paths", []) if body else []
                    return self._json([_entry(f, files[f]) for f in wanted if f in files])
            elif rest.startswith(f"/resolve/{revision}/"):
                return self._file(files, rest.removeprefix(f"/resolve/{revision}/"), commit)
        return self._refuse("RevisionNotFound", 404)

    def _tree(self, files: dict[str, bytes], folder: str) -> None:
        prefix = f"{folder}/" if folder else ""
        inside = [f for f in files if f.startswith(prefix)]
        if not inside:
            return self._refuse("EntryNotFound", 404)
        recursive = "recursive=true" in self.path.lower()
        entries = [_entry(f, files[f]) for f in inside if recursive or "/" not in f[len(prefix) :]]
        folders = {prefix + "/".join(f[len(prefix) :].split("/")[:-1]) for f in inside if "/" in f[len(prefix) :]}
        shown = folders if recursive else {prefix + f[len(prefix) :].split("/")[0] for f in folders}
        entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": f.strip("/")} for f in sorted(shown)]
        return self._json(entries)

    def _file(self, files: dict[str, bytes], name: str, commit: str) -> None:
        if name not in files:
            return self._refuse("EntryNotFound", 404)
        content = files[name]
        start, stop = 0, len(content)
        if wanted := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(wanted[1])
            stop = min(stop, int(wanted[2]) + 1) if wanted[2] else stop
        part = content[start:stop]
        is_data = self.command == "GET" and not name.endswith(".md")
        fault = self.hub.faults.pop(0) if is_data and self.hub.faults else ""
        if fault in ("500", "503", "429", "403"):
            return self._send(int(fault), b"no", {})
        if fault == "stall":
            time.sleep(self.hub.stall)
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        if fault == "truncated":
            part = part[: len(part) // 2]
        cut = len(part) // 2 if fault in ("reset", "short") else None
        return self._send(206 if wanted else 200, part, headers, cut, reset=fault == "reset")

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str, status: int) -> None:
        self._send(status, b'{"error": "refused"}', {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None, reset: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.sent += len(body[:cut])
        self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            if reset:  # SO_LINGER 0: the client sees a reset, and not an end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RDWR) if not reset else self.connection.close()
            self.close_connection = True


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}
