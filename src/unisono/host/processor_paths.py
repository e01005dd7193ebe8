"""The variables that have libraries compute on every processor as on an older one. They are read as torch is loaded."""

import shlex
from collections.abc import Mapping

PORTABLE: Mapping[str, str] = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
"""For torch's own vectors, oneDNN (convolutions) and MKL (matrix products, LAPACK)."""

LEVEL = "UNISONO_NUMERICS"
"""The variable that asks for a level of numerics."""

AS_EXPORT = "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in PORTABLE.items())
"""As a shell takes them."""


def numerics_variables(level: str | None) -> dict[str, str]:
    """The variables that a process needs from its start, for a level of numerics."""
    return {LEVEL: level, **PORTABLE} if level == "portable" else {} if level is None else {LEVEL: level}


def missing_in(environ: Mapping[str, str]) -> list[str]:
    """What of these variables an environment lacks, as a person reads it."""
    return [
        f"{name} is {environ.get(name, 'not set')}" for name, value in PORTABLE.items() if environ.get(name) != value
    ]
