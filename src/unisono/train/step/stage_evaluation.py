"""Forward passes of a model in stages without backward ones: what an evaluation or a prediction asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from unisono.data.streams import Generators
from unisono.errors import ModelError
from unisono.reduce.process_group import TensorUnderWay
from unisono.train.group.devices import Devices
from unisono.train.model.elsewhere import NOT_HANDED_ON, holds_elsewhere
from unisono.train.model.staging import Left, Received, Staging
from unisono.train.step.stage_messages import GENERATORS, Channel, Part, StageMessage

R = TypeVar("R")

_FIRST_TAG = 2**16
"""Behind those of training."""


class StagedEvaluation:
    """Calls a function of the model, of which each device computes its stages.

    Devices with neighbouring stages work on different batches at the same time: each goes on once it has sent.

    Args:
        staging: the stages.
        devices: the devices of this worker.
        device: the device to compute on.
    """

    def __init__(self, staging: Staging, devices: Devices, device: torch.device) -> None:
        self._staging, self._devices, self._device = staging, devices, device
        self._channels: dict[int, Channel] = {}
        self._sent: list[TensorUnderWay] = []

    def __call__(self, act: Callable[[], R]) -> R | None:
        """What the function returns on the device with the last stage, None on others.

        Args:
            act: the function, which calls the model once.

        Raises:
            WorkerLost: another device is gone.
        """
        drawn, found = Generators.capture(), None
        for block in self._staging.placement.own:
            drawn.restore()
            received = self._received(block) if block else None
            try:
                with self._staging.computing(block, received):
                    found = act()
                if holds_elsewhere(found):
                    raise ModelError(f"what the function returns has {NOT_HANDED_ON}")
            except Left as left:
                self._send(block, left)
        return found

    def shared(self, found: list[Any]) -> list[Any]:
        """What the device with the last stage has found, on all devices. Collective among them."""
        for transfer in self._sent:
            transfer.wait()
        self._sent.clear()
        last = self._staging.placement.last
        shared: list[Any] = self._devices.inside.broadcast(found if self._devices.rank == last else None, last)
        return shared

    def _received(self, block: int) -> Received:
        channel, source = self._channel(block - 1), self._staging.placement.device(block - 1)
        first, tag, exchange = channel.buffer(), _FIRST_TAG + 2 * block, self._devices.exchange
        exchange.receive(first, source, tag).wait()
        message = channel.opened(first, lambda rest: exchange.receive(rest, source, tag + 1).wait())
        generators = [part.tensor.cpu() for part in message.parts[:GENERATORS]]
        tensors = [part.tensor for part in message.parts[GENERATORS:]]
        return Received(message.numbers, tensors, partial(Generators.set_tensors, generators))

    def _send(self, block: int, left: Left) -> None:
        drawn = [Part(each.to(self._device)) for each in Generators.capture().as_tensors()]
        message = StageMessage(left.numbers, [*drawn, *map(Part, left.tensors)])
        target = self._staging.placement.device(block + 1)
        for rest, buffer in enumerate(self._channel(block).packed(message)):
            self._sent.append(self._devices.exchange.send(buffer, target, _FIRST_TAG + 2 * (block + 1) + rest))

    def _channel(self, hop: int) -> Channel:
        """The way from a block to the next one, for another message."""
        if hop not in self._channels:
            other = hop if self._staging.placement.device(hop) != self._devices.rank else hop + 1
            self._channels[hop] = Channel(self._device, self._staging.title(other))
        self._channels[hop].begin()
        return self._channels[hop]
