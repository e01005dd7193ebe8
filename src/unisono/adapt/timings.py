"""What a worker measured of its own steps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """One worker's figures, all of its own clock. They ride with the control word, so that all workers see the same.

    Attributes:
        shard_s: seconds that one shard took, in this step.
        step_s: seconds of the step before, from the end of the one before it to its own end.
        data_s: of these, waiting for samples.
        exposed_s: of these, waiting for the reduction after everything was computed.
        update_s: of these, the optimizer's update.
        sent_bytes: of gradients and control words, that others got from this worker in the step before.
        formed_s: seconds that forming the present generation took; 0 in the first one.
        checkpoint_s: seconds that the newest checkpoint took; 0 where none was written.
        sent_messages: that others got from this worker in the step before.
    """

    shard_s: float = 0.0
    step_s: float = 0.0
    data_s: float = 0.0
    exposed_s: float = 0.0
    update_s: float = 0.0
    sent_bytes: float = 0.0
    formed_s: float = 0.0
    checkpoint_s: float = 0.0
    sent_messages: float = 0.0
