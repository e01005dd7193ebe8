"""What a policy wants, and why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Verb = Literal[
    "resize",
    "set_batch_size",
    "set_learning_rate",
    "set_topology",
    "set_strategy",
    "set_balance",
    "replace",
    "measure_links",
    "checkpoint",
    "stop",
]

Figure = float | int | str | None


@dataclass(frozen=True, slots=True)
class Decision:
    """One verb of one policy, taken after a step. All of a step take effect together.

    Attributes:
        policy: its name.
        verb: what is to be done.
        value: of what, if the verb takes one.
        why: the figures behind it, by name.
        shards: that batches are cut into from then on, if the verb says so.
    """

    policy: str
    verb: Verb
    value: float | int | str | None = None
    why: Mapping[str, Figure] = field(default_factory=dict)
    shards: int | None = None

    def __str__(self) -> str:
        cut = "" if self.shards is None else f", shards={self.shards}"
        return f"{self.policy}: {self.verb}({'' if self.value is None else self.value}{cut})"


def decisions_digest(decisions: Sequence[Decision]) -> int:
    """A number above 0 and below 2**49 that differs where decisions do; the figures behind them do not count."""
    told = json.dumps([[one.policy, one.verb, one.value, one.shards] for one in decisions])
    return 1 + int.from_bytes(hashlib.blake2b(told.encode(), digest_size=6).digest(), "little")
