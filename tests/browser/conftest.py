"""The browser tests are asked for by `make test-browser`; elsewhere they are not even collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TILEWISE_BROWSER") else ["test_*.py"]
