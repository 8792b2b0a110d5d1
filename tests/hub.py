"""A Hugging Face Hub on this machine, with one repository of real files, models' or datasets' alike."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

COMMIT = "0123456789" * 4


@contextmanager
def serving(files: Mapping[str, bytes], cache: Path) -> Iterator[list[str]]:
    """Meanwhile the Hub is here, and what comes from it goes to the cache. The paths that were asked for."""
    from huggingface_hub import constants

    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            name = unquote(self.path).partition(f"/resolve/{COMMIT}/")[2]
            content = files.get(name)
            if "/api/" in self.path:
                told: Any = {"id": "some/thing", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                if "/tree/" in self.path:
                    told = [{"type": "file", "path": name, "size": len(files[name]), "oid": COMMIT} for name in files]
                content = json.dumps(told).encode()
            self.send_response(404 if content is None else 200)
            content = content or b""
            tag = hashlib.sha256(content).hexdigest()
            for key, value in {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Content-Length": len(content)}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        changes = {"ENDPOINT": place, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": True}
        changes["HUGGINGFACE_CO_URL_TEMPLATE"] = place + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in changes.items():
            patch.setattr(constants, name, value)
        yield asked
        server.shutdown()
