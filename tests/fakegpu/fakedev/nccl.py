"""What ``ProcessGroupNCCL`` promises its callers, over Gloo on the memory of the simulated accelerator.

* A call returns at once, and so does ``wait()``: it has the current stream wait, never the host.
* When another worker is gone, nothing is raised: the kernel goes on until ``abort()``.
* After ``abort()`` what was under way ends *without an error*, and its output is whatever lay there.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fakedev import _C, NAME  # type: ignore[import-not-found]


class Options:
    """How long NCCL's watchdog waits; here nobody does."""

    _timeout = timedelta(minutes=30)


class Work:
    """What is under way in a stream of the group's own."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        return True


class ProcessGroupNCCL:
    """The calls that are made of it."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        own: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        own._timeout = timedelta(hours=1)
        own._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, own)
        self._store, self._size, self._rank = store, size, rank
        self._stream: Any = None
        self._aborted = threading.Event()
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._under_way: list[Any] = []
        threading.Thread(target=self._work, daemon=True, name="simulated-nccl").start()

    def _work(self) -> None:
        while True:
            before, act, gate = self._todo.get()
            for each in before:
                each.wait()
            if not self._aborted.is_set():
                try:
                    act()
                except RuntimeError:
                    self._aborted.wait()  # a kernel that spins
            gate.open()

    def _enqueue(self, name: str, reads: list[Tensor], writes: list[Tensor], act: Callable[[], Any]) -> Work:
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        if any(each.device.type != NAME for each in (*reads, *writes)):
            raise ValueError("Tensors must be CUDA and dense")
        device = (reads + writes)[0].device
        if self._stream is None:  # the communicator is made by the first call, with all others
            self._meet(device)
        current = torch.accelerator.current_stream(device)
        self._stream.wait_stream(current)
        number = self._stream.stream_id
        before = _C.gates(device.index, number)
        _C.kernel(device.index, number, reads, writes, f"nccl:{name}")
        for each in (*reads, *writes):
            each.record_stream(self._stream)
        gate = _C.Gate()
        _C.gate(device.index, number, gate)
        self._under_way.append(gate)
        self._todo.put((before, act, gate))
        return Work(self._stream.record_event(), device)

    def _meet(self, device: torch.device) -> None:
        self._store.set(f"device of {self._rank}", str(device.index))
        devices = [self._store.get(f"device of {rank}").decode() for rank in range(self._size)]
        if len({*devices}) < len(devices):
            raise dist.DistBackendError(f"NCCL error: ncclInvalidUsage. Last error: Duplicate GPU detected : {devices}")
        self._stream = torch.Stream(device=device)

    def alltoall_base(self, output: Tensor, given: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]) -> Work:
        mine, theirs, keep = _C.alias(output), _C.alias(given), (output, given)
        return self._enqueue(
            "alltoall",
            [given],
            [output],
            lambda: (self._gloo.alltoall_base(mine, theirs, output_sizes, sizes).wait(), keep),
        )

    def _allgather_base(self, output: Tensor, given: Tensor) -> Work:
        mine, theirs, keep = _C.alias(output), _C.alias(given), (output, given)
        return self._enqueue(
            "allgather", [given], [output], lambda: (self._gloo._allgather_base(mine, theirs).wait(), keep)
        )

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        mine, is_root = _C.alias(tensor), root == self._rank
        reads, writes = ([tensor], []) if is_root else ([], [tensor])
        return self._enqueue("broadcast", reads, writes, lambda: (self._gloo.broadcast(mine, root).wait(), tensor))

    def allreduce(self, tensors: list[Tensor]) -> Work:
        mine = _C.alias(tensors[0])
        return self._enqueue("allreduce", tensors, tensors, lambda: (self._gloo.allreduce([mine]).wait(), tensors))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        mine = _C.alias(tensors[0])
        return self._enqueue("send", tensors, [], lambda: (self._gloo.send([mine], peer, tag).wait(), tensors))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        mine = _C.alias(tensors[0])
        return self._enqueue("recv", [], tensors, lambda: (self._gloo.recv([mine], peer, tag).wait(), tensors))

    def abort(self) -> None:
        self._aborted.set()
        for gate in self._under_way:
            gate.open()
        self._under_way.clear()

    def shutdown(self) -> None:
        self.abort()


def install() -> None:
    """Have ``torch.distributed`` offer it."""
    module: Any = dist
    module.ProcessGroupNCCL = ProcessGroupNCCL
    module.is_nccl_available = lambda: True
    dist.Backend.default_device_backend_map[NAME] = "nccl"
