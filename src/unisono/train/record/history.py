"""What ``fit`` returns: one record per epoch."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch.

    Attributes:
        epoch: from 0.
        loss: the mean training loss over the epoch's samples.
        metrics: means of what the loss function logged.
        validation: what evaluation on the validation set gave, if there is one.
        seconds: how long the epoch's training took.
        samples_per_s: its throughput.
    """

    epoch: int
    loss: float
    metrics: dict[str, float]
    validation: dict[str, float]
    seconds: float
    samples_per_s: float


@dataclass(slots=True)
class History:
    """The epochs that this process trained, in order."""

    epochs: list[EpochRecord] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The training loss of each epoch."""
        return [record.loss for record in self.epochs]

    def validation(self, name: str) -> list[float]:
        """One validation metric, for each epoch that has it."""
        return [record.validation[name] for record in self.epochs if name in record.validation]
