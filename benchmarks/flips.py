"""Three hundred flipped bits: each is found, or ends in the weights of the undisturbed training."""

import sys
from dataclasses import asdict, dataclass

from benchmarks.flip_campaign import ANY_TIME, PLACES, Result, campaign, counts, drawn
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report

NOTES = (
    "right: the weights of the undisturbed training. error: it ended with one. missed: nothing was there to strike.",
)
VERDICTS = ("right", "error", "missed", "wrong")


@dataclass(frozen=True, slots=True)
class Choice:
    """How the campaign is run.

    Attributes:
        flips: how many.
        seed: of all that is drawn.
        any_time: whether they strike one worker at moments that are drawn in time: some do so while an update is made.
    """

    flips: int = 300
    seed: int = 0
    any_time: bool = False


def run(choice: Choice) -> Report:
    """Strike one training after the other."""
    meter = NoiseMeter()
    meter.calibrate()
    results = campaign(drawn(choice.seed, choice.flips, any_time=choice.any_time), told)
    found = counts(results)
    places = (ANY_TIME,) if choice.any_time else PLACES
    rows = [(place, *(str(found.get((place, verdict), 0)) for verdict in VERDICTS)) for place in places]
    rows.append(("all", *(str(sum(one.verdict == verdict for one in results)) for verdict in VERDICTS)))
    wrong = [f"{result.flip}: {result.words}" for result in results if result.verdict == "wrong"]
    return Report(
        name="flips",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[Grid("flipped bits, by place", ("place", *VERDICTS), rows, NOTES)],
        figures={"results": [asdict(result) for result in results]},
        failures=[] if choice.any_time else wrong,
    )


def told(result: Result) -> None:
    """Show how far it is."""
    mark = {"right": ".", "error": "e", "missed": "-", "wrong": "W"}[result.verdict]
    print(mark, end="", file=sys.stderr, flush=True)
