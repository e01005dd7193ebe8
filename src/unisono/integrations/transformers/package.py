"""Transformers and accelerate: whoever imports this before anything that loads them is told what is missing."""

from importlib import import_module
from importlib.util import find_spec

from unisono.errors import JobError

_MISSING = [name for name in ("transformers", "accelerate") if find_spec(name) is None]

if _MISSING:
    raise JobError(
        f"unisono.transformers needs {' and '.join(_MISSING)}: pip install 'unisono[transformers]', or in a clone of "
        f"Unisono pip install '.[transformers]'"
    )

transformers = import_module("transformers")

if not hasattr(transformers.Trainer, "_run_epoch"):
    raise JobError(
        f"unisono.transformers needs Transformers 5.5 or newer, and {transformers.__version__} is installed, whose "
        f"Trainer has its whole loop in one function: pip install --upgrade 'transformers>=5.5'"
    )
