"""The package's page: the README with links that lead somewhere from outside the repository too, and the project's addresses.

An image becomes an address too, that of the file itself, or is left out.

The address is `repository` under [tool.hatch.metadata.hooks.custom] in pyproject.toml, and `files` what stands before the path
of a file there. As long as they are empty a link to a file becomes the file's name, since a dead link helps nobody.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)\n*")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
PAGES = {"Documentation": "docs/design.md", "Changelog": "CHANGELOG.md"}


def absolute(text: str, files: str) -> str:
    """Markdown with every relative link led below `files`, or, where there is no such place, written as a name."""

    def led(link: re.Match[str]) -> str:
        words, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link[0]
        if files:
            return f"[{words}]({files.rstrip('/')}/{target})"
        return words if words.rstrip("/") == target.rstrip("/") else f"{words} ({target})"

    def shown(image: re.Match[str]) -> str:
        words, target = image.groups()
        if "://" in target:
            return image[0]
        raw = files.rstrip("/").replace("/blob/", "/raw/")
        return f"![{words}]({raw}/{target})\n\n" if files else ""

    return LINK.sub(led, IMAGE.sub(shown, text))


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository, files = self.config.get("repository", ""), self.config.get("files", "")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, files)}
        if repository:
            pages = {name: f"{files.rstrip('/')}/{path}" for name, path in PAGES.items() if files}
            metadata["urls"] = {"Repository": repository, **pages}
