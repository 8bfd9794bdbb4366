"""Files of the cache: believed only by who wrote them, and never a reason to fail."""

from __future__ import annotations

import os
from pathlib import Path

from tilewise.hardware.cache import load_json, store_json


def test_cache_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    assert load_json(path, {"v": 1}) is None
    assert store_json(path, {"v": 1}, {"a": 2.5})
    assert load_json(path, {"v": 1}) == {"a": 2.5}
    assert load_json(path, {"v": 2}) is None, "another identity's file"
    if hasattr(os, "mkfifo"):
        pipe = tmp_path / "pipe.json"
        os.mkfifo(pipe)
        assert load_json(pipe, {"v": 1}) is None, "a pipe would be waited for"
        assert store_json(pipe, {"v": 1}, {"a": 2.5}) and load_json(pipe, {"v": 1}) == {"a": 2.5}
    assert load_json(tmp_path, {"v": 1}) is None, "a directory"
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not store_json(blocked / "x.json", {}, {}), "a place that cannot be written is no error"
