"""What the devices of a worker tell each other in a step: each of them then speaks for the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from unisono.received import value_of
from unisono.reduce.tally import PRIME
from unisono.train.group.control import Balance, Flags, ShardReport, any_of
from unisono.train.group.devices import Devices, Round
from unisono.train.model.buffers import Buffers
from unisono.train.step.loss import Shard
from unisono.words import MODULUS

T = TypeVar("T")

_TOLD = tuple[list[ShardReport], list[bool], Flags, tuple[int, int]]


def shared_weights(devices: Devices, rounds: Sequence[Round], shards: Sequence[Shard]) -> list[float]:
    """The weights of all shards of the worker, in their order. Collective among the devices.

    Args:
        devices: the devices of the worker.
        rounds: the rounds of its shards.
        shards: what this device computes in each round.
    """
    own = [shard.report.weight for shard in shards]
    return _in_order(devices.gather(own), rounds) if devices.count > 1 else own


def shared_buffers(devices: Devices, turn: Round, buffers: Buffers) -> None:
    """Have what each shard of a round has made of the buffers on all devices. Collective among them."""
    if devices.count == 1 or not len(buffers):
        return
    for source, shard in enumerate(turn.shards):
        made = list(buffers.result(shard)) if source == devices.rank else None
        if made := devices.inside.broadcast(made, source):  # an empty shard has made nothing
            buffers.set_result(shard, made)


def shared_report(
    devices: Devices, rounds: Sequence[Round], reports: Sequence[ShardReport], used: Sequence[bool], flags: Flags
) -> tuple[Sequence[ShardReport], Sequence[bool], Flags]:
    """The reports of all shards of the worker, what they have used, and the flags of all its devices as one.

    Collective among the devices.

    Args:
        devices: the devices of the worker.
        rounds: the rounds of its shards.
        reports: the report of this device's shard of each round.
        used: the flags of the tensors that its shards have used.
        flags: what it has to say.
    """
    if devices.count == 1:
        return reports, used, flags
    in_stages = devices.losses is not None
    # One of the devices that hold stages has all losses. They have other tensors, and each tells of its own.
    said = devices.gather(
        told_of(reports if devices.losses in (None, devices.rank) else (), () if in_stages else used, flags)
    )
    told = [value_of(_TOLD, each, "what another device told") for each in said]
    every_report, every_used, every_flags, balances = zip(*told, strict=True)
    is_used = used if in_stages else [any(each) for each in zip(*every_used, strict=True)]
    return _in_order(every_report, rounds), is_used, _merged(every_flags, balances)


def told_of(reports: Sequence[ShardReport], used: Sequence[bool], flags: Flags) -> list[Any]:
    """What a device tells the others of it, as JSON."""
    plain = asdict(flags)
    balance, copies = plain.pop("balance")
    return [[asdict(report) for report in reports], list(map(bool, used)), plain, [balance % MODULUS, copies % PRIME]]


def _in_order(told: Sequence[Sequence[T]], rounds: Sequence[Round]) -> list[T]:
    """What devices told of their shard of each round, in the order of the shards."""
    return [told[device][turn] for turn, each in enumerate(rounds) for device in each.devices]


def _merged(flags: Sequence[Flags], balances: Sequence[tuple[int, int]]) -> Flags:
    """One worker's flags, of which each device has slices, and a memory of its own."""
    return Flags(
        **any_of(flags),
        digest=sum(each.digest for each in flags) % MODULUS,
        amiss=sum(each.amiss for each in flags) % MODULUS,
        timings=flags[0].timings,
        balance=Balance(*(sum(each) for each in zip(*balances, strict=True))),
    )
