"""Settings that tests have a launcher, or a run, be told: by their own names, without the groups that they are in."""

from typing import Any

from unisono.settings.reading import RENAMED, TABLE, settings_by_path
from unisono.settings.table import Settings

PATHS = {setting.name: path for path, setting in TABLE.items() if not path.startswith("special.")} | RENAMED


def options(**said: Any) -> Settings:
    """What a person says on the command line: ``options(threads=2)``."""
    return settings_by_path({PATHS[name]: value for name, value in said.items()})


def grouped(said: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a script, each in its group: ``{"threads": 2}`` is ``{"arithmetic": {"threads": 2}}``."""
    found: dict[str, Any] = {}
    for name, value in said.items():
        group, _, own = PATHS.get(name, name).rpartition(".")
        if group:
            found.setdefault(group, {})[own] = value
        else:
            found[own] = value
    return found
