"""The command line: each command in its own file, registered in app.py."""

from __future__ import annotations

import sys

from tilewise.errors import MissingPackageError, require


def main() -> None:
    """The command `tilewise`."""
    try:
        require("cli", "typer", "rich")
    except MissingPackageError as error:
        sys.exit(f"tilewise: {error}")
    from tilewise.cli.app import app

    app()
