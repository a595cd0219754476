"""A hub of one repository on this machine, for tests: what huggingface_hub asks of the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(folder: Path, *, repo: str) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub whose `repo` holds the folder's files at COMMIT, and the files fetched from it."""
    fetched: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(folder, repo, fetched))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(folder: Path, repo: str, fetched: list[str]) -> type[BaseHTTPRequestHandler]:
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path, model = self.path.partition("?")[0], f"/api/models/{repo}"
            file = path.removeprefix(f"/{repo}/resolve/{COMMIT}/")
            if path in (model, f"{model}/revision/main", f"{model}/revision/{COMMIT}"):
                siblings = [{"rfilename": name} for name in names]
                self.reply(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
            elif path.startswith(f"{model}/tree/{COMMIT}"):
                self.reply(200, json.dumps([self.entry(name) for name in names]).encode())
            elif file in names:
                fetched.extend([file] * (self.command == "GET"))
                self.reply(200, (folder / file).read_bytes())
            elif path.startswith(f"{model}/revision/"):
                self.reply(404, b"{}", error="RevisionNotFound")
            else:
                self.reply(404, b"{}", error="RepoNotFound")

        def entry(self, name: str) -> dict[str, object]:
            content = (folder / name).read_bytes()
            return {"type": "file", "path": name, "size": len(content), "oid": sha1(content).hexdigest()}

        def reply(self, status: int, content: bytes, *, error: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


def run_python(code: str, *arguments: str, environment: dict[str, str]) -> str:
    """What another process, with just this environment, prints."""
    command = [sys.executable, "-c", code, *arguments]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=60)
    assert not result.stderr, result.stderr
    assert result.returncode == 0
    return result.stdout
