"""Variables of the environment: text that becomes numbers and switches, or is refused by name."""

import math
from collections.abc import Mapping

from unisono.errors import JobError
from unisono.received import LONGEST_SHOWN, decimal_number, short, whole_number

MOST = 10**18 - 1
"""What is counted and has no smaller limit: 64 bits hold it, and as many steps take longer than anybody waits."""

LAST_PORT = 2**16 - 1


class Variables:
    """Variables of the environment, with the errors that a person needs. An empty one counts as not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._set = {name: value for name, value in environ.items() if value}

    def get(self, name: str) -> str | None:
        """A variable; None if it is not set."""
        return self._set.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._set

    def said(self, *names: str) -> str:
        """Those of these variables that are set, with their values, for a message."""
        found = [f"{name}={self._set[name][:LONGEST_SHOWN]}" for name in names if name in self._set]
        return f"{' and '.join(found)} {'are' if len(found) > 1 else 'is'}"

    def text(self, name: str, because: str) -> str:
        """A variable that must be set, ``because`` another one is."""
        if name not in self._set:
            raise JobError(f"{name} is not set in the environment, but {because}")
        return self._set[name]

    def count(self, name: str, because: str, least: int = 0, most: int = MOST) -> int:
        """A variable that must be a whole number from ``least`` to ``most``."""
        found = whole_number(self.text(name, because))
        if found is None or not least <= found <= most:
            limit = "" if most == MOST else f" and at most {most}"
            raise self.refusal(name, f"needs a whole number of at least {least}{limit}")
        return found

    def number(
        self, name: str, least: float = -math.inf, most: float = math.inf, *, whole: bool = False
    ) -> float | None:
        """A number from ``least`` to ``most``; None if the variable is not set."""
        if (value := self.get(name)) is None:
            return None
        found = whole_number(value) if whole else decimal_number(value)
        if found is None or not least <= found <= most:
            limits = "" if math.inf in (-least, most) else f" of at least {least:g} and at most {most:g}"
            raise self.refusal(name, f"needs a {'whole ' if whole else ''}number{limits}")
        return found

    def switch(self, name: str) -> bool | None:
        """Whether something is on; None if the variable is not set."""
        if (value := self.get(name)) is None:
            return None
        if value not in ("0", "1"):
            raise self.refusal(name, "use 0 or 1")
        return value == "1"

    def refusal(self, name: str, wanted: str) -> JobError:
        """The error that names a variable and its value, and says what is wanted."""
        return JobError(f"{name}={short(self._set[name])} in the environment: {wanted}")

    def port(self, name: str, because: str) -> int:
        """A variable that must be a TCP port."""
        return self.count(name, because, least=1, most=LAST_PORT)

    def rank(self, name: str, size_name: str, because: str) -> tuple[int, int]:
        """A rank and the number of workers that it is one of."""
        size = self.count(size_name, because, least=1)
        rank = self.count(name, because)
        if rank >= size:
            raise JobError(
                f"{name}={rank} and {size_name}={size} in the environment contradict each other: "
                f"the ranks of {size} workers are 0 to {size - 1}"
            )
        return rank, size
