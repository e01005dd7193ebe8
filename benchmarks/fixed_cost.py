"""What a step costs that computes next to nothing: the plain loop, DDP and Unisono take turns, on 1, 2, 8 shards."""

from benchmarks.report import Report
from benchmarks.shards import Choice, Loop, Race, run

SHARDS = (1, 2, 8)


def races(workers: int) -> list[Race]:
    """One worker beside the plain loop that adds up as many gradients; several beside DDP."""
    plain = [Loop(f"plain loop, passes: {count}", "plain", {"passes": count}) for count in SHARDS]
    alone = [Loop(f"Unisono, shards: {count}", options={"shards": count}) for count in SHARDS]
    ddp = Loop("DDP", "ddp", {"bucket_mb": 25})
    together = [Loop(f"Unisono, shards: {count}", options={"shards": count}) for count in SHARDS if count >= workers]
    return [
        Race("1 worker", 1, (*plain, *alone)),
        Race(f"{workers} workers", workers, (ddp, *together)),
    ]


def measure(choice: Choice) -> Report:
    """Measure both."""
    return run(choice, "fixed-cost", races)
