"""State beside the model that no registry has: where it is looked for, what scripts say of it, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from unisono.changes import Look
from unisono.checkpoint.folder import UNNAMED
from unisono.errors import JobError, UnnamedState
from unisono.host.tracebacks import warn
from unisono.received import short
from unisono.train.model.prepared import Prepared
from unisono.train.state.registry import Registry

KEEP = (
    'run.register("{name}", …), with state_dict and load_state_dict, has checkpoints and other workers get it; '
    "run.prepare(state={{…}}) combines tensors that shards change"
)
"""How state is kept."""

IGNORE = 'if it decides nothing, run.ignore("{path}")'
"""How a script says that it need not be."""


class UnnamedStates:
    """The state of a script that lies in no registry.

    Args:
        registry: the state that is kept.
        is_main: whether this worker speaks for all.
        journal: writes an event to the journal.
        strict: whether to refuse what others are warned of.

    Attributes:
        data: the data set and the function that collates in the present loop, by name.
        loss_fn: the newest loss function; None before the first call of ``step.run``.
        by_shards: the paths that shards change, which is told of where that is seen.
        is_trying: whether a shard is computed again, to see what its gradient goes by.
        combined: the paths whose changes by shards a guest combines, with all that lies below them.
    """

    def __init__(
        self, registry: Registry, is_main: Callable[[], bool], journal: Callable[..., None], *, strict: bool
    ) -> None:
        self._registry, self._is_main, self._journal, self._strict = registry, is_main, journal, strict
        self._ignored: list[str] = []
        self._told: set[str] = set()
        self._is_blind = False
        self._further: dict[str, Any] = {}
        self._prepared: Prepared | None = None
        self.data: dict[str, Any] = {}
        self.loss_fn: Any = None
        self.by_shards: set[str] = set()
        self.combined: set[str] = set()
        self.is_trying = False

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Compute shards again within the context: nothing that they log or keep counts."""
        self.is_trying = True
        try:
            yield
        finally:
            self.is_trying = False

    def ignore(self, *paths: str) -> None:
        """Note paths that decide nothing, with all that lies below them.

        Raises:
            JobError: one is no path.
        """
        for path in paths:
            if not isinstance(path, str) or not path:  # type: ignore[redundant-expr]  # scripts may be unchecked
                raise JobError(f'run.ignore({short(path)}): needs a path, as warnings name it, such as "model.cache"')
            self._ignored.append(path)

    def add(self, **roots: Any) -> None:
        """Look for state from further objects of a framework: its trainer, its callbacks."""
        self._further |= roots

    def prepared(self, prepared: Prepared) -> None:
        """Note the models: weights, buffers and optimizers are kept."""
        self._prepared = prepared

    def look(self, others: Sequence[Any] = (), *, has_data: bool = True, **further: Any) -> Look:
        """Look at all state that can be reached and is kept nowhere; from further objects, too.

        ``others`` are objects that are kept by somebody else; ``has_data`` says whether to look at what loops read.
        """
        known = [*others, *(getattr(thing, "owner", thing) for thing in self._registry.objects.values())]
        places: frozenset[tuple[int, str]] = frozenset()
        models: Mapping[str, Any] = {}
        if self._prepared is not None:
            known += [*self._prepared.optimizers, *self._prepared.tensors().values()]
            places = frozenset((id(place.registry), place.key) for place in self._prepared.buffers)
            modules = self._prepared.modules
            models = {"model": modules[0]} if len(modules) == 1 else {f"model[{n}]": m for n, m in enumerate(modules)}
        identities, functions = set(map(id, known)), {} if self.loss_fn is None else {"loss_fn": self.loss_fn}
        data = self.data if has_data else {}
        roots = {**models, **data, **self._further, **functions, **further}
        try:
            return Look(
                {} if self._is_blind else roots,
                lambda thing: id(thing) in identities or isinstance(thing, nn.Parameter),
                lambda place: (id(place.holder), place.key) in places or self.is_ignored(place.path),
            )
        except Exception as error:  # noqa: BLE001 (objects of scripts may do anything when they are looked at)
            self._is_blind = True
            if self._is_main():
                self._journal(f"{UNNAMED} is not looked for", why=f"{type(error).__name__}: {str(error)[:400]}")
            return Look({})

    def tell(self, path: str, text: str, keep: str = KEEP, *, is_own: bool = False, breaks: bool = True) -> None:
        """Warn of a path, once, or refuse it.

        Args:
            path: the path.
            text: the matter with it: a sentence without its end.
            keep: the way to keep it.
            breaks: whether bits may depend on the number of workers because of it.
            is_own: whether only this worker knows: else the main worker speaks for all.

        Raises:
            UnnamedState: the run is strict.
        """
        if path in self._told or self.is_ignored(path):
            return
        self._told.add(path)
        name = path.rpartition(".")[2].partition("[")[0]
        words = f"{text}. {keep.format(name=name)}; {IGNORE.format(path=path)}"
        if speaks := is_own or self._is_main():
            self._journal(UNNAMED, path=path, why=words, breaks=breaks)
        if self._strict:
            raise UnnamedState(words)
        if speaks:
            warn(words)

    def is_ignored(self, path: str) -> bool:
        """Whether the script has said that a path decides nothing."""
        return _is_below(path, self._ignored)

    def is_combined(self, path: str) -> bool:
        """Whether a guest combines what shards change there."""
        return _is_below(path, self.combined)


def _is_below(path: str, others: Iterable[str]) -> bool:
    return any(path == other or path.startswith((f"{other}.", f"{other}[")) for other in others)
