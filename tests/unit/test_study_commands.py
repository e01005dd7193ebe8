"""What ``unisono study`` starts, and where it writes."""

import pytest
import torch

import unisono.cli.study as command
from unisono.cli.study import plain_workers

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("workers", "threads", "plain"),
    [((1, 2, 4, 8), 1, (1, 2, 4)), ((2, 4), 2, (1, 2)), ((2,), 4, (1,)), ((4,), 16, (1,))],
)
def test_the_plain_loop_gets_the_threads_of_as_many_workers_as_there_are_cores_for(
    workers: tuple[int, ...], threads: int, plain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plain_workers(workers, threads) == plain
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert plain_workers(workers, threads) == (1,)
