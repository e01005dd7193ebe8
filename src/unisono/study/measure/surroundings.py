"""The machine that a study is measured on, for those who read its figures."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

CPUS = Path("/proc/cpuinfo")


def surroundings(cores: int) -> dict[str, Any]:
    """What figures depend on besides the script, by name.

    Args:
        cores: that this process may use.
    """
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "unisono": version("unisono"),
    }


def _processor() -> str:
    if CPUS.exists():
        for line in CPUS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"
