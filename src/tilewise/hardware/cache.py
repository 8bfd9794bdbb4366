"""Files that are written whole or not at all, and JSON in them that is believed only if it verifies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

CACHE_VARIABLE = "TILEWISE_CACHE_DIR"


def cache_root() -> Path:
    """Where what was measured and compiled is kept: TILEWISE_CACHE_DIR, or the system's place for caches."""
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        return Path(configured)
    try:
        from platformdirs import user_cache_path
    except ImportError:  # a checkout in which only part of the dependencies is installed
        return Path.home() / ".cache" / "tilewise"
    return user_cache_path("tilewise")


def open_regular(path: Path) -> BinaryIO:
    """The file for reading; OSError unless it is an ordinary one. A pipe in its place would be waited for without end."""
    # without waiting until somebody writes to a pipe; ordinary files ignore it
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no ordinary file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _digest(identity: dict[str, Any], payload: dict[str, Any]) -> str:
    text = json.dumps([identity, payload], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load_json(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The payload stored for exactly this `identity`; None if there is none, or if the file is damaged or another's."""
    try:
        with open_regular(path) as file:
            stored = json.loads(file.read().decode("utf-8"))
        payload: dict[str, Any] = stored["payload"]
        intact = stored["identity"] == identity and stored["sha256"] == _digest(identity, payload)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return payload if intact else None


def store_json(path: Path, identity: dict[str, Any], payload: dict[str, Any]) -> bool:
    """Write atomically; False if the place cannot be written."""
    record = {"identity": identity, "payload": payload, "sha256": _digest(identity, payload)}
    return write_atomic(path, json.dumps(record, indent=1).encode())


def write_atomic(path: Path, data: bytes) -> bool:
    """A fresh file renamed into place: a reader sees the old content or the new. False if the place cannot be written."""
    temporary = ""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
