"""Workers of several hosts get the keys of their network in a folder that the hosts share, or are told what to do."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from unisono.errors import JobError
from unisono.reduce.data_network import NetworkKeys, write_keys
from unisono.train.group.meeting import shared_keys

pytestmark = pytest.mark.unit


class Board:
    """Where workers that are threads find each other."""

    def __init__(self, alter: Callable[[str, bytes], bytes]) -> None:
        self._store, self._alter = dist.HashStore(), alter

    def post(self, name: str, value: bytes) -> None:
        self._store.set(name, self._alter(name, value).decode())

    def read(self, name: str) -> bytes:
        return bytes(self._store.get(name))


def all_of(folder: Path, alter: Callable[[str, bytes], bytes] = lambda name, value: value) -> list[NetworkKeys | str]:
    """What three workers get, or are told."""
    board = Board(alter)

    def one(rank: int) -> NetworkKeys | str:
        try:
            return shared_keys(folder, rank, 3, board, "a", patience_s=0.5)
        except JobError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, range(3)))


def test_all_workers_get_the_same_keys_and_no_file_stays(tmp_path: Path) -> None:
    keys = all_of(tmp_path / "runs")
    assert isinstance(keys[0], NetworkKeys)
    assert keys[0].pem
    assert keys[0] == keys[1] == keys[2]
    assert list((tmp_path / "runs").iterdir()) == []


def test_hosts_that_share_no_files_are_told_what_to_do(tmp_path: Path) -> None:
    def elsewhere(name: str, value: bytes) -> bytes:
        return json.dumps(["/nowhere/.keys-1.pem", json.loads(value)[1]]).encode() if name == "keys" else value

    first, *others = all_of(tmp_path, elsewhere)
    assert "rank 1 cannot read the keys that rank 0" in str(first)
    assert "UNISONO_DATA_KEYS" in str(first)
    assert all("cannot read the keys that rank 0 has put into /nowhere" in str(said) for said in others)
    assert list(tmp_path.iterdir()) == []


def test_keys_that_an_outsider_names_in_the_store_are_not_taken(tmp_path: Path) -> None:
    write_keys(tmp_path / "forged.pem")

    def forged(name: str, value: bytes) -> bytes:
        return json.dumps([str(tmp_path / "forged.pem"), json.loads(value)[1]]).encode() if name == "keys" else value

    first, *others = all_of(tmp_path, forged)
    assert "rank 1 cannot read the keys" in str(first)
    assert all("holds other keys than those of rank 0" in str(said) for said in others)


@pytest.mark.parametrize("told", [b"", b"{}", b"[1, 2]", b'["a"]'])
def test_what_is_told_is_checked(told: bytes, tmp_path: Path) -> None:
    _, *others = all_of(tmp_path, lambda name, value: told if name == "keys" else b"no")
    assert all("rank 0 does not tell where the keys" in str(said) for said in others)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, *others = all_of(tmp_path / "file")
    assert "the keys cannot be written to" in str(first)
    assert all("see its error" in str(said) for said in others)
