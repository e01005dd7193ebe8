"""Several training loaders of a trainer as one, whose batches have a batch of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, Dataset, Sampler

from unisono.errors import DataError
from unisono.integrations.kit import refused
from unisono.integrations.lightning.framework import part
from unisono.integrations.lightning.whole_batches import is_indexed

CombinedLoader: Any = part("utilities.combined_loader").CombinedLoader


class _Samples(Dataset[Any]):
    """Samples of several data sets together, each by one number: ``a + len(A) * (b + len(B) * …)``."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self._datasets = datasets

    def __len__(self) -> int:
        return self.number([len(dataset) - 1 for dataset in self._datasets]) + 1

    def __getitem__(self, number: int) -> list[Any]:
        samples = []
        for dataset in self._datasets:
            number, at = divmod(number, len(dataset))
            samples.append(dataset[at])
        return samples

    def number(self, places: Sequence[int]) -> int:
        """The number of the samples at these places of the data sets."""
        number = 0
        for dataset, place in zip(reversed(self._datasets), reversed(places), strict=True):
            number = number * len(dataset) + place
        return number


class _Batches(Sampler[list[int]]):
    """Batches of these samples: as many as the longest loader has, or the shortest one.

    A loader that is over begins anew.
    """

    def __init__(self, samples: _Samples, loaders: Sequence[Any], steps: int) -> None:
        self._samples, self._loaders, self._steps = samples, loaders, steps
        self.batch_size = loaders[0].batch_size

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        each = [_again_and_again(loader.batch_sampler) for loader in self._loaders]
        for _ in range(self._steps):
            rows = [next(batches) for batches in each]
            if len(sizes := sorted({len(row) for row in rows})) > 1:
                raise DataError(refused("lightning.uneven-loaders", sizes=" and ".join(map(str, sizes))))
            yield [self._samples.number(places) for places in zip(*rows, strict=True)]

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers which epoch comes."""
        for loader in self._loaders:
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)


def _again_and_again(batches: Any) -> Iterator[list[int]]:
    while True:
        yield from batches


class _Collate:
    """Puts samples of several data sets together, those of each by its loader's own function."""

    def __init__(self, functions: Sequence[Any], structure: TreeSpec) -> None:
        self._functions, self._structure = functions, structure

    def __call__(self, samples: Sequence[Any]) -> Any:
        columns = zip(*samples, strict=True)
        batches = [collate(list(column)) for collate, column in zip(self._functions, columns, strict=True)]
        return tree_unflatten(batches, self._structure)


class _Together:
    """Several loaders as one that can only be iterated over, and gives a batch of each."""

    def __init__(self, loaders: Any, mode: str) -> None:
        self._loaders, self._mode = loaders, mode

    def __len__(self) -> int:
        lengths = [len(loader) for loader in tree_leaves(self._loaders)]
        return min(lengths) if self._mode == "min_size" else max(lengths)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, *_ in CombinedLoader(self._loaders, self._mode))


def joined(combined: Any) -> Any:
    """A loader for a ``CombinedLoader`` of several loaders, whose batches have as many samples each.

    Raises:
        DataError: one of them has no batches; says what to do.
    """
    places, structure = tree_flatten(combined.iterables)
    loaders = [place.loader for place in places]
    if combined._mode not in ("max_size_cycle", "min_size") or not all(map(is_indexed, loaders)):
        return _Together(tree_unflatten(loaders, structure), combined._mode)
    if not all(map(len, loaders)):  # one that begins anew would have nothing for ever
        raise DataError(refused("lightning.unlike-loaders"))
    lengths, samples = [len(loader) for loader in loaders], _Samples([loader.dataset for loader in loaders])
    steps = min(lengths) if combined._mode == "min_size" else max(lengths)
    return DataLoader(
        samples,
        batch_sampler=_Batches(samples, loaders, steps),
        collate_fn=_Collate([loader.collate_fn for loader in loaders], structure),
        num_workers=max(loader.num_workers for loader in loaders),
    )
