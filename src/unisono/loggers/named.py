"""Loggers by name, as scripts, the command line and the environment give them."""

from collections.abc import Callable, Sequence

from unisono.errors import JobError
from unisono.loggers.csv_file import CSVLogger
from unisono.loggers.logger import Logger
from unisono.loggers.mlflow import MLflowLogger
from unisono.loggers.tensorboard import TensorBoardLogger
from unisono.loggers.wandb import WandbLogger
from unisono.named import require_named, thing_named
from unisono.received import short, why_of

NAMED: dict[str, Callable[[], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "csv": CSVLogger,
    "mlflow": MLflowLogger,
    "wandb": WandbLogger,
}


def loggers_of(given: Sequence[Logger | str], where: str = "loggers") -> tuple[Logger, ...]:
    """Make loggers, and see whether they can work.

    Args:
        given: loggers, names of our own, of those that packages bring, or ``module:Class``, which are called
            without arguments.
        where: the argument, variable or option that they stand in, for errors.

    Raises:
        JobError: there is no such logger, two are alike, or a package is missing; says what to do.
    """
    found = tuple(_made(one, where) if isinstance(one, str) else one for one in given)
    for logger in found:
        logger.require_packages()
    names = [logger.name for logger in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise JobError(f"{where}: {short(twice)} is there twice: leave one of them out, or give it another name")
    return found


def require_loggers(names: Sequence[str], where: str) -> None:
    """Refuse names of no logger, as :func:`~unisono.named.require_named` does."""
    require_named(names, NAMED, "logger", where)


def _made(name: str, where: str) -> Logger:
    make = thing_named(name, NAMED, "logger", where)
    try:
        logger = make()
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever a class of the user does)
        raise JobError(f"{where}={short(name)}: the logger cannot be made: {why_of(error)}") from None
    if not isinstance(logger, Logger):
        raise JobError(f"{where}={short(name)}: it makes a {type(logger).__name__}, and no unisono.Logger")
    return logger
