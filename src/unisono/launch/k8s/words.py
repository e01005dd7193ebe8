"""The words of Kubernetes that people write on the command line: names, quantities, tolerations, variables."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from unisono.errors import JobError
from unisono.received import short

LONGEST_NAME = 40
"""Of a JobSet: its pods are called ``NAME-coordinator-0-0-abcde``, and a host name has 63 characters at most."""

LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
KEY = re.compile(rf"((?=[^/]{{1,253}}/){SUBDOMAIN.pattern}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_HOST = (
    r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:]+\])(:[0-9]+)?"
)
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
IMAGE = re.compile(
    rf"({_HOST}/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@[A-Za-z][\w.+-]*:[0-9A-Fa-f]{{32,}})?", re.ASCII
)
"""Registry, path, tag and digest, as kubelets read them: for any other text no pod ever starts."""

LARGEST_COUNT = 2**31 - 1
"""Of restarts: the APIs count in 32 bits."""

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
UNITS = {"": Decimal(1), "m": Decimal("0.001")}
UNITS |= {unit: Decimal(1000) ** n for n, unit in enumerate("kMGTPE", 1)}
UNITS |= {f"{unit}i": Decimal(1024) ** n for n, unit in enumerate("KMGTPE", 1)}
LEAST_MEMORY = 2**20


OBJECT_NAME = SUBDOMAIN, 253, "no name of an object of Kubernetes: lower-case letters, digits, dashes and dots"
DASHES = "lower-case letters, digits and dashes,"
NAMES = {
    "--image": (IMAGE, 512, "no name of an image, such as registry.example/me/train:1"),
    "--name": (LABEL, LONGEST_NAME, f"write a DNS label: up to 40 {DASHES} a letter first, and no dash at the end"),
    "--namespace": (NAMESPACE, 63, f"write a DNS label: up to 63 {DASHES} and no dash at either end"),
    "--secret": OBJECT_NAME,
    "--claim": OBJECT_NAME,
}
"""What a name looks like, the largest number of its characters, and what to write, by the option that says it."""


def require_name(option: str, text: str) -> None:
    """Refuse what nothing of its kind can be called.

    Raises:
        JobError: says what a name is made of.
    """
    pattern, longest, cure = NAMES[option]
    if not pattern.fullmatch(text) or len(text) > longest:
        raise JobError(f"{option} {short(text)}: {cure}")


def label_of(text: str) -> str:
    """The DNS label that is nearest to a name: ``train-digits`` for ``train_digits``."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:LONGEST_NAME].strip("-")
    return found or "train"


def read_quantity(option: str, text: str) -> Decimal:
    """A quantity as Kubernetes reads it, in cores or bytes.

    Raises:
        JobError: it is none, or nothing; quotes it.
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([A-Za-z]*)", text)
    if found is None or found[2] not in UNITS:
        hint = ""
        if found is not None and (unit := re.fullmatch(r"([kKmMgGtT])i?[bB]", found[2])):
            hint = f": {found[1]}{unit[1].upper()}i, say"
        raise JobError(f"{option} {short(text)}: write a number, with a unit of Kubernetes (Mi, Gi, M, G; m){hint}")
    amount = Decimal(found[1]) * UNITS[found[2]]
    if not amount:
        raise JobError(f"{option} {text}: more than nothing is needed")
    return amount


def require_cores(option: str, text: str) -> None:
    """Refuse what is no number of cores: ``4``, ``500m``.

    Raises:
        JobError: it is none, or a number of bytes.
    """
    read_quantity(option, text)
    if not re.fullmatch(r"[0-9.]+|[0-9]+m", text):
        raise JobError(f"{option} {text}: cores are written as 4, 0.5 or 500m")


def require_memory(option: str, text: str) -> None:
    """Refuse what is no size of a memory: ``16Gi``.

    Raises:
        JobError: it is none, or so small that the unit must be missing or wrong.
    """
    amount = read_quantity(option, text)
    if amount < LEAST_MEMORY:
        raise JobError(f"{option} {text}: that is {amount:f} bytes; write a unit, as in 16Gi or 512Mi")


def read_selector(text: str) -> tuple[str, str]:
    """``KEY=VALUE``, a label of nodes.

    Raises:
        JobError: it is none.
    """
    key, equals, value = text.partition("=")
    if not equals or not KEY.fullmatch(key) or not VALUE.fullmatch(value):
        raise JobError(f"--node-selector {short(text)}: write KEY=VALUE, a label that nodes have")
    return key, value


@dataclass(frozen=True, slots=True)
class Toleration:
    """A taint of nodes that a pod does not mind.

    Attributes:
        key: the key of the taint.
        value: the value of the taint; None for any.
        effect: one of ``EFFECTS``; empty for all.
    """

    key: str
    value: str | None = None
    effect: str = ""

    @classmethod
    def read(cls, text: str) -> "Toleration":
        """``KEY``, ``KEY=VALUE``, either with ``:EFFECT`` behind it, as ``kubectl taint`` writes taints.

        Raises:
            JobError: it is none.
        """
        taint, colon, effect = text.partition(":")
        key, equals, value = taint.partition("=")
        if not KEY.fullmatch(key) or not VALUE.fullmatch(value) or (colon and effect not in EFFECTS):
            raise JobError(
                f"--toleration {short(text)}: write KEY, KEY=VALUE or KEY=VALUE:EFFECT; effects: {', '.join(EFFECTS)}"
            )
        return cls(key, value if equals else None, effect)

    @property
    def manifest(self) -> dict[str, Any]:
        """As a pod has it."""
        how = {"operator": "Exists"} if self.value is None else {"operator": "Equal", "value": self.value}
        return {"key": self.key, **how, **({"effect": self.effect} if self.effect else {})}


def read_variables(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE``, environment variables.

    Raises:
        JobError: one is none; names it, and never its value.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise JobError(f"--env {short(name)}: write NAME=VALUE")
        found[name] = value
    return found
