"""Scripts of the guide's pages, as they are printed there."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "guide"


def printed(page: str, name: str) -> str:
    """A script of a page, by the name that stands before it."""
    text = (GUIDE / page).read_text()
    found = re.search(rf"`{name}`:\n\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, name
    return found[1]
