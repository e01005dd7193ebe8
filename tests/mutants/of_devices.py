"""Mistakes in what is asked of an accelerator: found on a simulated one."""

from mutants.mutant import Mutant

DEVICE = "device.py"
NETWORK = "reduce/process_group.py"

JOBS = ("tests/procs/test_accelerators.py",)

MUTANTS = (
    Mutant(
        "the step does not wait for the stream that has reduced its gradient",
        DEVICE,
        "            stream.wait_event(self._event)\n",
        "",
        JOBS,
    ),
    Mutant(
        "memory of sums is free before the stream that uses them is done",
        DEVICE,
        "                tensor.record_stream(stream)\n",
        "                pass\n",
        JOBS,
    ),
    Mutant(
        "what an aborted network has left passes for a result",
        NETWORK,
        "        if self._is_aborted:\n",
        "        if False:\n",
        ("tests/unit/test_transport.py",),
    ),
    Mutant(
        "a bucket is sent before the device has copied it",
        NETWORK,
        "        current_stream(self._result.device).synchronize()\n",
        "",
        JOBS,
    ),
    Mutant(
        "each step leaves a set of gradients on the device",
        NETWORK,
        "return self._result.copy_(self._total, non_blocking=True)",
        "return torch.empty_like(self._result).copy_(self._total, non_blocking=True)",
        JOBS,
    ),
    Mutant(
        "a value is read before the device has written it",
        DEVICE,
        "            self._stream.synchronize()  # not",
        "            pass  # not",
        JOBS,
    ),
    Mutant(
        "a checkpoint is written before its copy has come",
        DEVICE,
        "            self._event.synchronize()\n",
        "            pass\n",
        JOBS,
    ),
)
