"""Strategies by name, as the command line, the environment and policies give them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from unisono.errors import JobError
from unisono.named import brought
from unisono.received import decimal_number, short, whole_number
from unisono.sync.averaging import DiLoCo, LocalSGD
from unisono.sync.strategy import AllReduce, Strategy

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (AllReduce, LocalSGD, DiLoCo)}
"""Our own; packages bring others, of which the lab is one."""


def strategy_of(given: Strategy | str) -> Strategy:
    """A strategy, from itself or from its text: ``local-sgd``, ``parameter-server:synchronous=false,max_staleness=8``.

    Raises:
        JobError: there is no such strategy or setting, or a value is out of range; says which there are.
    """
    if isinstance(given, Strategy):
        return given
    if not isinstance(given, str):
        raise JobError(f"strategy={short(given)}: give a unisono.Strategy, or the name of one: {_listed()}")
    name, _, settings = given.partition(":")
    kind = STRATEGIES.get(name) or _brought(given, name)
    return kind(**dict(_setting(kind, given, word) for word in settings.split(",") if word))


def _brought(given: str, name: str) -> type[Strategy]:
    others = brought("strategy")
    if name not in others:
        raise JobError(f"strategy={short(given)}: there is no such strategy; choose of {_listed()}")
    kind = others[name].load()
    if not (isinstance(kind, type) and issubclass(kind, Strategy) and is_dataclass(kind)):
        packages = " and ".join(others[name].places)
        raise JobError(f"strategy={short(given)}: what {packages} brings is no data class of the kind unisono.Strategy")
    if kind.name != name:
        raise JobError(
            f"strategy={short(given)}: its class calls itself {kind.name!r}: give the entry point the same name, "
            f"by which checkpoints and other workers know it"
        )
    return kind


def _listed() -> str:
    return ", ".join([*STRATEGIES, *(name for name in brought("strategy") if name not in STRATEGIES)])


def _setting(kind: type[Strategy], given: str, word: str) -> tuple[str, object]:
    name, equals, value = word.partition("=")
    known = [field.name for field in fields(kind)]
    if not equals or name not in known:
        listed = f"its settings are {', '.join(known)}" if known else "it has no settings"
        raise JobError(
            f"strategy={short(given)}: {short(word)} is no setting of {kind.name}; {listed}, as in NAME=VALUE"
        )
    return name, _value(value)


def _value(text: str) -> object:
    if text in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text]
    whole = whole_number(text)
    found = decimal_number(text) if whole is None else whole
    return text if found is None else found  # the strategy refuses text in its own words
