"""Trainings under a synchronisation strategy: what a worker is told, and what it tells in the end."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

ModelName = Literal["digits", "char_lm", "mlp"]


class Exercise(BaseModel):
    """One training.

    Attributes:
        model: ``digits`` and ``char_lm`` are the examples of these names with smaller networks, and fewer documents;
            ``mlp`` is three layers on digits, updated by plain SGD.
        strategy: its text.
        seed: of the job.
        epochs: passes over the data.
        batch_size: of all workers together.
        shards: of a batch.
        rate: of learning.
        shard_ms: that a shard takes to compute on top, asleep: so is known what is slow.
        slow: how many times as long the worker of the highest rank takes for its shards.
        documents: of ``char_lm``, to train on.
    """

    model_config = ConfigDict(frozen=True)

    model: ModelName
    strategy: str
    seed: int = 0
    epochs: int = 12
    batch_size: int = 128
    shards: int = 4
    rate: float = 3e-3
    shard_ms: float = 0.0
    slow: float = 1.0
    documents: int = 3200


class Exercises(BaseModel):
    """What one crew trains, one after the other."""

    exercises: list[Exercise]


class Outcome(BaseModel):
    """How a training ended.

    Attributes:
        accuracy: on held-out images; 0 where there are none.
        loss: on held-out samples.
        samples: of the epochs behind the first one.
        seconds: that these took.
        steps: of all epochs.
        sent_bytes: in a step, by all workers together, as the transport has counted them.
        sent_messages: likewise.
        staleness: of all gradients, as far as there is such a thing.
        digest: of the weights.
    """

    accuracy: float
    loss: float
    samples: int
    seconds: float
    steps: int
    sent_bytes: float
    sent_messages: float
    staleness: list[int]
    digest: str

    @property
    def samples_per_s(self) -> float:
        """Of the epochs behind the first one."""
        return self.samples / self.seconds if self.seconds else 0.0


class Outcomes(BaseModel):
    """For each exercise; None where the loss was no number any more."""

    outcomes: list[Outcome | None]
