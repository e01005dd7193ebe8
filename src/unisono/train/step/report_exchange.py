"""What workers tell each other of a step, beside the gradients: the control word."""

from collections.abc import Sequence

from unisono.train.group.control import ControlWord, Flags, ShardReport, StepReport, signature_of
from unisono.train.group.devices import Round
from unisono.train.group.workers import Workers
from unisono.train.step.device_exchange import shared_report


class ReportExchange:
    """Tells the workers of a generation what their shards came to, and has all metrics known by name.

    Args:
        workers: the workers of the generation.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._known: dict[float, list[str]] = {signature_of(()): []}

    def told(
        self, rounds: Sequence[Round], reports: Sequence[ShardReport], used: Sequence[bool], flags: Flags
    ) -> tuple[StepReport, tuple[Flags, ...]]:
        """Tell all others, and hear them. Collective.

        Args:
            rounds: the rounds of this worker's shards.
            reports: the report of this device's shard of each round.
            used: a flag for each tensor: whether these shards have used it.
            flags: what this device has to say.

        Returns:
            the result of the step, and what each worker says.
        """
        split, transport = self._workers.transport.split, self._workers.transport
        word = ControlWord(split, len(used))
        reports, used, flags = shared_report(self._workers.devices, rounds, reports, used, flags)
        words = word.open(transport.all_gather(word.pack(reports, used, flags)))
        names = next((sorted(report.metrics) for report in reports if report.weight), None)
        logged = words.logged
        if logged is not None and words.has_silent_worker(split):
            if logged not in self._known:  # on any worker: all of them have seen the same
                everybody = self._workers.gather_json(names)
                self._known[logged] = next(known for known in everybody if known is not None)
            names = self._known[logged] if names is None else names
        return words.read(names or []), words.flags
