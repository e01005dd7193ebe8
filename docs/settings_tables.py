"""Writes the tables of docs/guide/settings.md from the table of settings: python docs/settings_tables.py."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unisono.settings.groups import NamedRow, settings_of
from unisono.settings.reading import GROUPS, OF_SCRIPTS
from unisono.settings.table import OF_LAUNCHERS, Settings

PAGE = Path(__file__).parent / "guide" / "settings.md"
TABLES = re.compile(r"(<!-- tables of (\w+):[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


def default(setting: NamedRow) -> str:
    """The default as a script would write it; nothing where the meaning says it."""
    if setting.default is None or setting.default == ():
        return ""
    value = setting.default
    return f"`{int(value) if isinstance(value, float) and value.is_integer() else repr(value)}`".replace("'", '"')


def meaning(setting: NamedRow) -> str:
    """What it means, with the place in the guide that has more."""
    text = setting.text.replace("``", "`")
    return f"{text} ([more]({setting.row.page}))" if setting.row.page else text


def elsewhere(setting: NamedRow) -> str:
    """How the command line and the environment say it."""
    names = [setting.row.variable, *setting.row.option.split("/")]
    return ", ".join(f"`{name}`" for name in names if name)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, *rows)).replace(
        "\n", f"\n|{'---|' * len(head)}\n", 1
    )


def of_group(kind: Any) -> str:
    """The settings of a group."""
    rows = [(f"`{one.name}`", default(one), elsewhere(one), meaning(one)) for one in settings_of(kind)]
    return table(("setting", "default", "variable, option", "meaning"), rows)


def arguments() -> str:
    """The arguments of a script: those of its own, and the groups."""
    parts = [of_group(Settings)]
    for name in OF_SCRIPTS:
        kind = GROUPS[name]
        about = (kind.__doc__ or "").strip().replace("``", "`")
        parts.append(f"### {name}\n\n`unisono.{kind.__name__}`. {about}\n\n{of_group(kind)}")
    return "\n\n".join(parts) + "\n"


def variables() -> str:
    """What the environment alone says."""
    rows = [(f"`{one.row.variable}`", default(one), meaning(one)) for one in settings_of(GROUPS["special"])]
    return table(("variable", "default", "meaning"), rows) + "\n"


def launchers() -> str:
    """What launchers and commands set for workers."""
    return table(("variable", "meaning"), [(f"`{name}`", text) for name, text in OF_LAUNCHERS.items()]) + "\n"


def written(page: str) -> str:
    """The page, with its tables as they are now."""
    made = {"arguments": arguments, "variables": variables, "launchers": launchers}
    return TABLES.sub(lambda found: f"{found[1]}{made[found[2]]()}{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
