"""Keys of the network between workers of several hosts, which they tell each other in a folder that the hosts share."""

import json
import os
import platform
import secrets
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from unisono.errors import JobError, Unreadable
from unisono.received import parse_json
from unisono.reduce.data_network import NetworkKeys, keys_from, write_keys
from unisono.reduce.peers import RendezvousStore

PATIENCE_S = 30.0
"""For a file that another host has written: networks of files may show it late."""

LOOK_S = 0.1

CURES = (
    "make keys once with `unisono keys keys.pem`, copy the file to each host, and set UNISONO_DATA_KEYS to its path; "
    "or let gradients travel in plain text, in a network that only this job's hosts are in: "
    "unisono.init(communication={'insecure_data': True}), or UNISONO_INSECURE_DATA=1"
)


def shared_keys(
    folder: Path, rank: int, workers: int, board: RendezvousStore, scope: str, patience_s: float = PATIENCE_S
) -> NetworkKeys:
    """Keys that rank 0 makes, in a file that only this user can read, until all have read it. Collective.

    Everybody may read the store in which workers of fixed number meet: so it has the file's path and digest alone.

    Args:
        folder: a folder that the hosts share.
        rank: this worker's rank.
        workers: the number of workers.
        board: a store of these workers.
        scope: a name for those that meet.
        patience_s: the seconds in which a file may appear on another host.

    Raises:
        JobError: a host cannot write or read the file; says what to do.
        LaunchError: another worker did not appear.
    """
    if rank == 0:
        return _told(folder, workers, board, scope)
    told = board.read("keys")
    try:
        keys = _found(*_path_from(told), scope, patience_s)
    except JobError:
        board.post(f"has/{rank}", b"no")
        raise
    board.post(f"has/{rank}", b"yes")
    return keys


def _told(folder: Path, workers: int, board: RendezvousStore, scope: str) -> NetworkKeys:
    path = folder.absolute() / f".keys-{secrets.token_hex(8)}.pem"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        write_keys(path)
    except JobError:
        board.post("keys", b"{}")  # nobody waits for them
        raise
    try:
        board.post("keys", json.dumps([str(path), sha256(path.read_bytes()).hexdigest()]).encode())
        without = [rank for rank in range(1, workers) if board.read(f"has/{rank}") != b"yes"]
        if without:
            raise JobError(
                f"workers of several hosts speak TLS, and rank {without[0]} cannot read the keys that rank 0 on host "
                f"{platform.node()} has put into {folder.absolute()}: {CURES}"
            )
        return keys_from(path, scope)
    finally:
        with suppress(OSError):
            path.unlink()


def _path_from(told: bytes) -> tuple[Path, str]:
    with suppress(Unreadable):
        match parse_json(told):
            case [str(path), str(digest)]:
                return Path(path), digest
    raise JobError("rank 0 does not tell where the keys of the network between the workers are: see its error")


def _found(path: Path, digest: str, scope: str, patience_s: float) -> NetworkKeys:
    until = time.monotonic() + patience_s
    while not path.exists() and time.monotonic() < until:
        time.sleep(LOOK_S)
    try:
        # Others can change the path: what is not this user's is not even opened.
        is_told = path.stat().st_uid == os.geteuid() and sha256(path.read_bytes()).hexdigest() == digest
    except OSError as error:
        raise JobError(
            f"workers of several hosts speak TLS, and host {platform.node()} cannot read the keys that rank 0 has put "
            f"into {path.parent} ({error.strerror}): hosts that share no files need them beforehand. So {CURES}"
        ) from error
    if not is_told:
        raise JobError(f"{path} holds other keys than those of rank 0, or belongs to somebody else: {CURES}")
    return keys_from(path, scope)
