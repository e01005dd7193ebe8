"""Why runs part, in words: what was measured, what likely lies behind it, and what to do. Pure, like the comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unisono.launch.verify.comparison import Difference, Finding, Stage
from unisono.launch.verify.hints import Topic

PROCESS = (Topic.RANK, Topic.GENERATOR, Topic.ORDER, Topic.WORLD)
CHANCE = (Topic.UNSEEDED, Topic.TIME, Topic.GENERATOR, Topic.ORDER, Topic.RELAXED)

MOST_NAMED = 8
"""Shards named in one line."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The likely cause of a finding.

    Attributes:
        likely: the cause, as a sentence.
        todo: the advice on it.
        topics: the kinds of places in the script that may have to do with it, the likeliest first.
    """

    likely: str
    todo: str
    topics: tuple[Topic, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A finding, and whether the run that it is compared with repeats itself; None if that was not tried."""

    finding: Finding
    repeats: bool | None = None

    @property
    def by_chance(self) -> bool:
        """Whether one and the same command gives different results."""
        return self.repeats is False or self.finding.against == self.finding.size

    @property
    def among_ranks(self) -> bool:
        """Whether the ranks of one run differ."""
        return self.finding.against is None

    @property
    def depends_on(self) -> str:
        """What a difference that is not chance depends on."""
        return "on the rank" if self.among_ranks else "on the number of workers"

    @property
    def asks(self) -> tuple[Topic, ...]:
        """How code comes to depend on it: ranks of one run see the same number of workers."""
        return (Topic.RANK,) if self.among_ranks else (Topic.WORLD, Topic.RANK)

    @property
    def from_the_first(self) -> bool:
        """Whether shard 0 of step 0 differs: rank 0 computes it first of all, whatever the number of workers."""
        return self.finding.began.step == 0 and "0" in self.finding.began.names


def explain(case: Case) -> Cause:
    """The likely cause of a finding."""
    return CAUSES[case.finding.stage](case)


def where(finding: Finding) -> str:
    """What was measured where the runs part."""
    began, (first, second) = finding.began, _sides(finding)
    if finding.stage is Stage.JOB:
        return "; ".join(f"{name} is {a} {first} and {b} {second}" for name, (a, b) in finding.job_differences.items())
    step = f"step {began.step}" + (f", call {began.call}" if began.call else "")
    match began.stage:
        case Stage.START:
            return f"before any step, after run.prepare: {_named(began)}"
        case Stage.BEFORE:
            until = "run.prepare" if began.step == 0 else f"step {began.step - 1}"
            return f"between the end of {until} and step.run in {step}: {_named(began)}"
        case Stage.INPUTS:
            return f"{step}: the batch of {_shards(began)} does not hold the same values"
        case Stage.SAMPLES | Stage.LOSSES | Stage.SHARES | Stage.CLIP | Stage.OPTIONS:
            return f"{step}: {_valued(began)} {first} and {_number(began, began.theirs)} {second}{_others(began)}"
        case Stage.GRADIENTS:
            return f"{step}: the gradient of {_named(began)}"
        case Stage.UPDATED:
            return f"{step}, right after the optimizer's update: {_named(began)}"
        case Stage.FLOW:
            return f"{step}: {began.ours} {first}, and {began.theirs} {second}"
        case Stage.LENGTH:
            return f"{began.ours} steps {first} and {began.theirs} {second}; equal as far as both go"
    return f"{step}, at the end of the loop's body: {_named(began)}"


def weights_text(finding: Finding) -> str:
    """Which parameter or buffer differs first, and how many others do."""
    weights = finding.parting.weights
    if weights is None:
        return "the same in all steps that both have"
    after = "after run.prepare" if weights.stage is Stage.START else f"after step {weights.step}"
    return f"{_named(weights)} {after}"


def equal_until_then(finding: Finding) -> str:
    """What was still equal in the step where the runs part; empty if nothing had been compared."""
    order = [Stage.BEFORE, Stage.INPUTS, Stage.LOSSES, Stage.GRADIENTS, Stage.OPTIONS, Stage.UPDATED]
    words = [
        "the weights",
        "every batch",
        "every loss",
        "the reduced gradients",
        "the optimizer's settings",
        "its update",
    ]
    stage = {Stage.SHARES: Stage.GRADIENTS, Stage.CLIP: Stage.GRADIENTS}.get(finding.stage, finding.stage)
    if stage is Stage.WEIGHTS:
        return ", ".join(words)
    return ", ".join(words[: order.index(stage)]) if stage in order else ""


def repeated_text(case: Case) -> str:
    """What the repetition showed; empty if there was none."""
    if case.repeats is None or case.finding.against is None:
        return ""
    who = str(case.finding.against)
    if case.repeats:
        return f"{who} a second time: the same bits, so it is not chance"
    return f"{who} a second time: other bits, so the number of workers is not to blame"


def _sides(finding: Finding) -> tuple[str, str]:
    if finding.against is None:
        return "on rank 0", f"on rank {finding.rank}"
    if finding.against == finding.size:
        return "in the first run", "in the second"
    return f"with {finding.against}", f"with {finding.size}"


def _named(difference: Difference) -> str:
    more = len(difference.names) - 1
    only = " (which only one side has)" if difference.absent else ""
    others = f" and {more} other{'s' if more > 1 else ''}" if more else ""
    return f"{difference.names[0]}{only}{others}"


def _shards(difference: Difference) -> str:
    names = difference.names[:MOST_NAMED]
    more = len(difference.names) - len(names)
    return f"shard{'s' if len(names) > 1 else ''} {', '.join(names)}" + (f" and {more} others" if more else "")


def _valued(difference: Difference) -> str:
    name, value = difference.names[0], _number(difference, difference.ours)
    match difference.stage:
        case Stage.SAMPLES:
            return f"shard {name} has {value} samples"
        case Stage.LOSSES:
            return f"the loss of shard {name} is {value}"
        case Stage.SHARES:
            return f"the weight of shard {name} is {value}"
    return f"{name} is {value}"


def _others(difference: Difference) -> str:
    names = difference.names[1:]
    if not names or difference.stage in (Stage.CLIP, Stage.OPTIONS):
        return f"; also {', '.join(names)}" if names else ""
    return f"; also {_shards(Difference(difference.stage, 0, None, names, '', ''))}"


def _number(difference: Difference, value: str) -> str:
    if difference.stage not in (Stage.LOSSES, Stage.SHARES):
        return value
    try:
        return repr(float.fromhex(value))
    except ValueError:  # a shard that only one side has
        return value


def _job(case: Case) -> Cause:
    names = " and ".join(case.finding.job_differences)
    return Cause(
        f"these are two different jobs: what unisono.init gets for {names} is not the same in both runs",
        "give unisono.init the same settings on any number of workers: batch_size counts the samples of all workers "
        "together, and Unisono distributes them",
        case.asks + CHANCE,
    )


def _start(case: Case) -> Cause:
    if case.finding.began.absent:
        return Cause(
            f"the model itself is not the same: how it is built depends {case.depends_on}",
            "build the same model everywhere",
            case.asks,
        )
    if case.by_chance:
        return Cause(
            "unseeded randomness: the first weights are drawn before unisono.init has seeded anything, or from a "
            "generator that no seed covers",
            "call unisono.init before the model is built; it seeds torch, NumPy and Python's random. Or seed them "
            "before",
            (Topic.EARLY, Topic.UNSEEDED, Topic.GENERATOR, Topic.TIME),
        )
    return Cause(
        f"the first weights depend {case.depends_on}",
        "build, load and scale the model without asking for the rank or the number of workers",
        (*case.asks, Topic.EARLY),
    )


def _before(case: Case) -> Cause:
    if case.by_chance:
        likely = "code outside of step.run changed the weights in a way that is not the same twice"
        return Cause(
            likely,
            "leave it out, or draw its random numbers from torch's, NumPy's or Python's global generators",
            CHANCE,
        )
    return _outside(case, "before step.run")


def _outside(case: Case, place: str) -> Cause:
    if case.among_ranks:
        likely = f"code {place} changed the weights on some workers only, for instance under `if run.is_main`"
    else:
        likely = f"code {place} changed the weights in a way that depends on the number of workers"
    return Cause(likely, "change weights on every worker alike, or leave it to step.run", case.asks)


def _samples(case: Case) -> Cause:
    if case.by_chance:
        return Cause("the data set has another length each time", "make its length follow from the data alone", CHANCE)
    return Cause(
        f"the data set has another length: its number of samples depends {case.depends_on}",
        "give run.steps the whole data set on every worker: it distributes the samples by itself",
        case.asks,
    )


def _inputs(case: Case) -> Cause:
    if case.by_chance:
        return Cause(
            "unseeded randomness in the data: one and the same sample is not the same twice (os.urandom, the time, a "
            "generator seeded by the system, files that change, or an order that comes from a set or a folder)",
            "call unisono.init before data are split, shuffled or made: it seeds torch, NumPy and Python; or give a "
            "seed. In __getitem__ draw from their global generators, seeded for every sample; sort what comes from a "
            "folder or a set",
            (Topic.UNSEEDED, Topic.TIME, Topic.GENERATOR, Topic.ORDER, Topic.EARLY),
        )
    if case.from_the_first:
        return Cause(
            f"the data depend {case.depends_on}: the data set may be cut by rank before run.steps gets it, or built "
            f"from the number of workers",
            "give run.steps the whole data set on every worker: it distributes the samples by itself",
            (Topic.WORLD, Topic.RANK, Topic.ORDER),
        )
    return Cause(
        "host-dependent data: what a sample is depends on the worker that loads it, or on which samples that worker "
        "has loaded before. A generator or a counter of the data set's own advances with every sample it loads, "
        "or files are read in another order",
        "make a sample follow from its index alone, and draw from torch's, NumPy's or Python's global generators, "
        "which are seeded for every sample; sort what comes from a folder",
        (Topic.GENERATOR, Topic.RANK, Topic.ORDER),
    )


def _losses(case: Case) -> Cause:
    if case.by_chance:
        return _unrepeatable(case, "the loss function")
    ranks = case.finding.ranks
    todo = (
        "compute the loss from the model and the batch alone; inside of the loss function, draw from torch's, NumPy's "
        "or Python's global generators, which are seeded for every shard"
    )
    if ranks and 0 not in ranks:
        said = ", ".join(map(str, sorted(ranks)))
        likely = (
            f"the loss depends on the rank: only shards of rank{'s' if len(ranks) > 1 else ''} {said} differ. It asks "
            f"for the rank, or for what each process has of its own: a generator, a counter, a running mean"
        )
        return Cause(likely, todo, PROCESS)
    likely = "the loss depends on the number of workers"
    if not case.from_the_first:
        likely += ", or on what the same process computed before: a generator, a counter, a running mean of its own"
    return Cause(likely, f"{todo}; Unisono divides by the size of the global batch itself", (Topic.WORLD, *PROCESS))


def _unrepeatable(case: Case, what: str) -> Cause:
    if case.finding.jobs[1].get("deterministic") is False:
        return Cause(
            f"an operation without a deterministic version, which arithmetic={{'deterministic': False}} allows; or "
            f"{what} draws on something that no seed covers (os.urandom, the time, a generator seeded by the system)",
            "take 'deterministic': False out of unisono.init: the operation is then named, and can be replaced",
            CHANCE,
        )
    return Cause(
        f"unseeded randomness: {what} draws on something that no seed covers (os.urandom, the time, a generator seeded "
        f"by the system), or calls an operation of an extension that is not deterministic",
        "draw from torch's, NumPy's or Python's global generators, which are seeded for every shard",
        CHANCE,
    )


def _shares(case: Case) -> Cause:
    if case.by_chance:
        return _unrepeatable(case, "the weight that the loss function returns")
    return Cause(
        "the weight that the loss function returns beside the loss depends on the worker",
        "return the number of samples or tokens of this very batch; Unisono divides by the total itself",
        PROCESS,
    )


def _clip(case: Case) -> Cause:
    return Cause(
        f"the limit given to step.run for clipping depends {case.depends_on}",
        "give step.run the same clip_norm and clip_value everywhere: the gradient is that of the global batch",
        (*case.asks, Topic.TIME),
    )


def _gradients(case: Case) -> Cause:
    if case.finding.jobs[1].get("reduction") == "native":
        return Cause(
            'the job uses "reduction": "native": the backend adds the gradients in an order of its own, which depends '
            "on the number of workers. It is not promised to be exact",
            'use "reduction": "exact" (the default) for the same bits on any number of workers',
            (Topic.NATIVE,),
        )
    if case.by_chance:
        return _unrepeatable(case, "the backward pass")
    if case.among_ranks:
        likely = "the workers updated with different gradients: a hook of the optimizer changes them on some workers"
    else:
        likely = "the backward pass depends on the worker: a gradient hook, or an autograd function of your own"
    return Cause(
        f"{likely}. If the script has nothing of that kind, this is a defect of Unisono: please report it",
        "compute gradients without asking for the rank or keeping a state between shards",
        PROCESS,
    )


def _options(case: Case) -> Cause:
    return Cause(
        f"the optimizer's settings depend {case.depends_on}",
        "set them from the global batch size, which is the same on any number of workers: there is nothing to scale",
        (*case.asks, Topic.TIME),
    )


def _updated(case: Case) -> Cause:
    if case.by_chance:
        return _unrepeatable(case, "the optimizer's update")
    return Cause(
        f"the optimizer made something else of the same gradients: its state, or its update, depends {case.depends_on}",
        "leave the optimizer's state alone on every worker, and let its update ask for no rank",
        case.asks,
    )


def _weights(case: Case) -> Cause:
    if case.finding.trained.intersection(case.finding.began.names):
        if case.by_chance:
            return _before(case)
        return _outside(case, "after step.run")
    if case.by_chance:
        return _unrepeatable(case, "what writes into that buffer")
    return Cause(
        f"only buffers differ: the model's forward pass, or code outside of step.run, writes something into them that "
        f"depends {case.depends_on}",
        "write into buffers only what follows from the batch and the weights",
        PROCESS,
    )


def _flow(case: Case) -> Cause:
    return Cause(
        f"the script takes another path: which calls it makes depends {case.depends_on}, or on something that is not "
        f"the same twice",
        "call step.run equally often, in the same order, with the same optimizers on every worker",
        case.asks + CHANCE,
    )


def _length(case: Case) -> Cause:
    return Cause(
        f"the loop itself depends {case.depends_on}: it ends at a number of steps that is worked out from the world "
        f"size, or breaks off by the clock",
        "let run.steps decide when it ends: a step is one global batch, whatever the number of workers",
        (*case.asks, Topic.TIME),
    )


CAUSES: dict[Stage, Callable[[Case], Cause]] = {
    Stage.JOB: _job,
    Stage.START: _start,
    Stage.BEFORE: _before,
    Stage.SAMPLES: _samples,
    Stage.INPUTS: _inputs,
    Stage.LOSSES: _losses,
    Stage.SHARES: _shares,
    Stage.CLIP: _clip,
    Stage.GRADIENTS: _gradients,
    Stage.OPTIONS: _options,
    Stage.UPDATED: _updated,
    Stage.WEIGHTS: _weights,
    Stage.FLOW: _flow,
    Stage.LENGTH: _length,
}
