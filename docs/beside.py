"""What lies beside this folder and belongs to the site: the README is its first page, and examples can be opened."""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Of the repository's root, and where they lie in the site."""

LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add them."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for path in sorted(ROOT.glob("examples/*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links name files of the repository; they become links between files of the site."""
    written = {to: name for name, to in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        target = normpath(f"{dirname(written)}/{link[1]}").lstrip("/")
        if target == "examples":
            return relpath("examples/digits.py", dirname(page.file.src_uri) or ".")
        return relpath(PAGES.get(target, target.removeprefix("docs/")), dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)
