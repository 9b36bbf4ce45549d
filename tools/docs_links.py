"""A hook for mkdocs: links from docs/ to files outside it (`../launcher/config.py`) become the file's path.

On a code host such a link opens the file. The built pages hold no sources, so a link would lead nowhere.
tests/launcher/test_documentation.py checks that every linked file exists.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_other: Any) -> str:
    """Rewrites the links of a page. mkdocs calls it with each page's text before rendering."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if not target.startswith("../"):
            return match[0]
        path = target.removeprefix("../")
        label = match[1]
        return f"`{path}`" if label.strip("`") in path else f"{label} (`{path}`)"

    return _LINK.sub(replaced, markdown)
