"""Records on disk: JSON that says what was measured, where, with which versions, and when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewise.lab.bench.engine import Record
from tilewise.lab.bench.machine import machine, versions

FORMAT = 1


def document(suite: str, records: Sequence[Record], **more: Any) -> dict[str, Any]:
    """Everything a reader needs to judge the figures."""
    return {
        "format": FORMAT,
        "suite": suite,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "records": [record.to_dict() for record in records],
        **more,
    }


def save(document: dict[str, Any], directory: Path) -> Path:
    """Write it as `<suite>-<date>.json`; an existing file is never overwritten."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{document['suite']}-{document['date'][:10]}"
    number = 1
    while True:
        path = directory / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(document, file, indent=1, ensure_ascii=False)
                file.write("\n")
            return path
        except FileExistsError:
            number += 1
