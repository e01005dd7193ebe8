import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.adapt.batch_policies import AdaScale, BatchSizeSchedule, LinearScaling, NoiseScalePolicy
from unisono.adapt.communication_policies import StragglerPolicy, StrategyPolicy, TopologyPolicy
from unisono.adapt.layout_policies import GoodputPolicy, ScalingPolicy, SpotPolicy
from unisono.adapt.norms import Noise
from unisono.adapt.policy_names import NAMED, policies_named
from unisono.adapt.view import BatchShape, Decision, Policy, Timings, View, decisions_digest
from unisono.errors import JobError, PolicyError
from unisono.plan.topology import Links
from unisono.received import short
from unisono.sync import LocalSGD
from unisono.train.config.run_config import StrategyConstraints
from unisono.train.state.policy_state import PolicyState, observed
from unisono.train.state.registry import Registry

pytestmark = pytest.mark.unit

VIEW = View(
    step=50,
    epoch=0,
    samples=3200,
    batch_size=64,
    base_batch_size=64,
    shards=8,
    base_shards=8,
    world_size=2,
    learning_rate=0.1,
)


def verbs(policy: Policy) -> list[tuple[str, Any]]:
    return [(one.verb, one.value) for one in policy.decided()]


def noisy(scale: float, **more: Any) -> View:
    return replace(VIEW, noise=Noise(variance=scale, signal=1.0), **more)


def test_the_batch_is_doubled_once_the_noise_scale_is_twice_as_large_and_the_rate_follows_over_a_ramp() -> None:
    policy = NoiseScalePolicy(largest=256, every=50, ramp=2)
    policy.after_step(noisy(127.0))
    assert verbs(policy) == []
    policy.after_step(noisy(128.0))
    assert verbs(policy) == [("set_batch_size", 128)]
    policy.after_step(noisy(500.0, step=51, batch_size=128))
    policy.after_step(noisy(500.0, step=52, batch_size=128, learning_rate=0.1 * 2**0.5))
    assert [value for _, value in verbs(policy)] == pytest.approx([0.1 * 2**0.5, 0.2])
    policy.after_step(noisy(500.0, step=53, batch_size=128))
    assert verbs(policy) == []


def test_the_batch_is_halved_when_it_is_far_above_the_noise_but_not_below_where_it_began() -> None:
    policy = NoiseScalePolicy(largest=256, rule="none")
    policy.after_step(noisy(60.0, batch_size=128))
    assert verbs(policy) == [("set_batch_size", 64)]
    policy.after_step(noisy(10.0))
    assert verbs(policy) == []


@pytest.mark.parametrize("view", [VIEW, noisy(-1.0), noisy(500.0, step=51), noisy(500.0, batch_size=256)])
def test_the_batch_stays_while_nothing_is_known_between_two_looks_and_at_its_limit(view: View) -> None:
    policy = NoiseScalePolicy(largest=256)
    policy.after_step(view)
    assert verbs(policy) == []


def test_adams_rate_follows_by_the_square_root() -> None:
    policy = NoiseScalePolicy(largest=256, rule="sqrt", ramp=1)
    policy.after_step(noisy(200.0))
    policy.after_step(noisy(200.0, step=51))
    assert verbs(policy)[1][1] == pytest.approx(0.1 * 2**0.5)


def test_a_schedule_multiplies_the_batch_at_the_beginning_of_its_epochs() -> None:
    policy = BatchSizeSchedule({30: 5, 60: 2})
    for epoch in (28, 29, 30, 59):
        policy.after_epoch(replace(VIEW, epoch=epoch))
    assert verbs(policy) == [("set_batch_size", 320), ("set_batch_size", 128)]


def test_linear_scaling_brings_the_rate_to_its_goal_evenly() -> None:
    policy, rate, seen = LinearScaling(factor=4, samples=640), 0.1, []
    for step in range(1, 13):
        policy.after_step(replace(VIEW, samples=64 * step, learning_rate=rate))
        rate = next((value for _, value in verbs(policy) if value), rate)
        seen.append(rate)
    assert seen[:10] == pytest.approx([0.1 * (1 + 0.3 * step) for step in range(1, 11)])
    assert seen[10:] == [seen[9]] * 2


def test_linear_scaling_leaves_a_rate_of_nothing_alone_and_makes_up_for_it_later() -> None:
    policy = LinearScaling(factor=4, samples=640)
    policy.after_step(replace(VIEW, samples=320, learning_rate=0.0))  # the script's schedule begins there
    assert verbs(policy) == []
    policy.after_step(replace(VIEW, samples=640, learning_rate=0.1))
    assert verbs(policy) == [("set_learning_rate", pytest.approx(0.4))]


def timed(policy: Policy, view: View, *timings: Timings, **more: Any) -> list[tuple[str, Any]]:
    policy.after_step(replace(view, workers=timings, world_size=len(timings), steady=9, topology="direct", **more))
    return verbs(policy)


def test_a_slow_worker_gets_fewer_shards_first_and_is_replaced_if_that_does_not_help() -> None:
    policy = StragglerPolicy(factor=1.5, replace_at=3.0, patience=3)
    slow = [Timings(shard_s=0.01), Timings(shard_s=0.04), Timings(shard_s=0.011)]
    assert [timed(policy, VIEW, *slow, generation=1) for _ in range(3)] == [[], [], [("set_balance", "speed")]]
    assert [timed(policy, VIEW, *slow, generation=1, seconds=19.0) for _ in range(9)] == [[]] * 9  # not split yet
    assert [timed(policy, VIEW, *slow, generation=2) for _ in range(3)] == [[], [], [("replace", 1)]]
    alike = [Timings(shard_s=0.01)] * 3
    assert [timed(policy, VIEW, *alike, generation=3) for _ in range(9)] == [[]] * 9


def test_where_shards_cannot_be_split_better_a_slow_worker_is_replaced_after_a_while() -> None:
    policy = StragglerPolicy(patience=1)
    slow = [Timings(shard_s=0.01), Timings(shard_s=0.04)]
    said = [timed(policy, VIEW, *slow, seconds=seconds) for seconds in (1.0, 20.0, 22.0)]
    assert said == [[("set_balance", "speed")], [], [("replace", 1)]]


def test_a_worker_for_which_fewer_shards_make_up_stays() -> None:
    policy = StragglerPolicy(factor=1.5, replace_at=3.0, patience=2)
    slow = [Timings(shard_s=0.02), Timings(shard_s=0.01)]
    said = [timed(policy, VIEW, *slow, generation=1) for _ in range(9)]
    assert said == [[], [("set_balance", "speed")], *[[]] * 7]


def test_workers_that_serve_are_neither_slow_nor_what_others_are_compared_with() -> None:
    policy = StragglerPolicy(patience=1)
    serving = [Timings(shard_s=0.0)] * 3
    alike, slow = [Timings(shard_s=0.01)] * 2, [Timings(shard_s=0.01), Timings(shard_s=0.05)]
    assert timed(policy, VIEW, *alike, *serving) == []
    assert timed(policy, VIEW, *slow, *serving) == [("set_balance", "speed")]


def test_one_slow_step_is_no_straggler_and_one_worker_has_none() -> None:
    policy = StragglerPolicy(patience=2)
    for seconds in (0.05, 0.01, 0.05, 0.01):
        assert timed(policy, VIEW, Timings(shard_s=seconds), Timings(shard_s=0.01)) == []
        assert timed(policy, VIEW, Timings(shard_s=seconds)) == []


def waits(*exposed_s: float) -> list[Timings]:
    return [Timings(exposed_s=each, step_s=0.1) for each in exposed_s]


def test_when_communication_has_become_slow_connections_are_measured_and_then_topologies() -> None:
    policy, links = TopologyPolicy(factor=1.5, patience=3), Links.of({(0, 1): (0.001, 5e6)}, 2)
    assert [timed(policy, VIEW, *waits(0.01, 0.02)) for _ in range(8)] == [[]] * 8
    assert [timed(policy, VIEW, *waits(0.03, 0.04)) for _ in range(3)] == [[], [], [("measure_links", None)]]
    policy.after_step(replace(VIEW, workers=tuple(waits(0.03, 0.04)), steady=9, topology="ring", links=links))
    (decision,) = policy.decided()
    assert (decision.verb, decision.value) == ("set_topology", "auto")
    assert dict(decision.why) == {
        "before": "ring",
        "exposed_s": 0.03,
        "usual_s": 0.01,
        "slowest_link": "0-1",
        "bytes_per_s": 5e6,
    }
    assert [timed(policy, VIEW, *waits(0.03, 0.04)) for _ in range(9)] == [[]] * 9  # which is usual now


@pytest.mark.parametrize("exposed_s", [(0.01, 0.09), (0.03, 0.012)])
def test_a_worker_that_the_others_wait_for_is_no_matter_of_topology(exposed_s: tuple[float, float]) -> None:
    policy = TopologyPolicy(patience=2)
    for _ in range(5):
        timed(policy, VIEW, *waits(0.01, 0.01))
    assert [timed(policy, VIEW, *waits(*exposed_s)) for _ in range(5)] == [[]] * 5


def test_what_is_usual_is_learnt_anew_when_workers_change() -> None:
    policy = TopologyPolicy(patience=2)
    for generation, exposed_s in enumerate((0.01, 0.03, 0.02), 1):
        said = [timed(policy, VIEW, *waits(exposed_s, exposed_s), generation=generation) for _ in range(5)]
        assert said == [[]] * 5


def test_with_a_limit_for_a_shard_the_number_of_shards_follows_the_batch_up_and_down() -> None:
    policy = NoiseScalePolicy(largest=1024, rule="none", largest_shard=8)
    for view in (noisy(500.0), noisy(500.0, batch_size=128, shards=16), noisy(60.0, batch_size=256, shards=32)):
        policy.after_step(view)
    decided = [(one.value, one.shards) for one in policy.decided()]
    assert decided == [(128, 16), (256, 32), (128, 16)]


@pytest.mark.parametrize(
    "policy", [NoiseScalePolicy(largest=256, largest_shard=4), BatchSizeSchedule({3: 5}, largest_shard=4)]
)
def test_a_limit_for_a_shard_is_kept_from_the_first_step_on(policy: Policy) -> None:
    policy.before_train(VIEW)
    policy.before_train(replace(VIEW, shards=16))
    assert [(one.value, one.shards) for one in policy.decided()] == [(64, 16)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: NoiseScalePolicy(largest=9, largest_shard=0),
        lambda: NoiseScalePolicy(largest=9, rule="cubic"),  # type: ignore[arg-type]
        lambda: BatchSizeSchedule({0: 2}),
        lambda: BatchSizeSchedule({3: 0}),
        lambda: LinearScaling(0, 5),
        lambda: StragglerPolicy(factor=1.0),
        lambda: StragglerPolicy(factor=2.0, replace_at=1.5),
        lambda: TopologyPolicy(patience=0),
    ],
)
def test_words_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(JobError):
        wrong()


@pytest.mark.parametrize(
    ("policy", "said", "needed"),
    [
        (ScalingPolicy, {"price": "high"}, "price='high': needs a number"),
        (GoodputPolicy, {"largest": "512"}, "largest='512': needs a whole number"),
        (BatchSizeSchedule, {"factors": 5}, "factors=5: needs a dict"),
        (NoiseScalePolicy, {"largest": 9, "rule": "cubic"}, "rule='cubic': needs 'linear' or 'sqrt' or 'none'"),
        (SpotPolicy, {"market": "prices.csv"}, "market='prices.csv': needs a function"),
        (AdaScale, {"schedule": 0.1}, "schedule=0.1: needs a function"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(policy: type[Policy], said: dict[str, Any], needed: str) -> None:
    with pytest.raises(JobError, match=f"^{re.escape(needed)}$"):
        policy(**said)


# -- at work


class Says(Policy):
    """Decides what it is told to."""

    def __init__(self, *decisions: tuple[str, Any]) -> None:
        self._says = decisions
        self.asked: list[str] = []

    def after_step(self, view: View) -> None:
        self.asked.append("after_step")
        for verb, value in self._says:
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            getattr(self, verb)(*values, seen=view.step)


def policy_state(*policies: Policy) -> PolicyState:
    return PolicyState(policies, batch_size=64, shards=8)


def decide(at_work: PolicyState) -> Sequence[Decision]:
    decisions = at_work.ask("after_step", VIEW)
    at_work.take(decisions, VIEW, loop=0)
    return decisions


def test_all_that_was_decided_takes_effect_together_and_says_why() -> None:
    at_work = policy_state(Says(("set_batch_size", 128), ("set_learning_rate", 0.3), ("checkpoint", None)))
    decisions = decide(at_work)
    assert at_work.batch_size == 128
    assert at_work.rate == pytest.approx(3.0)
    assert [str(one) for one in decisions][::2] == ["says: set_batch_size(128)", "says: checkpoint()"]
    assert all(one.why == {"seen": 50} for one in decisions)


def test_the_number_of_shards_stays_until_a_policy_says_another() -> None:
    at_work = policy_state(Says(("set_batch_size", (128, 16))))
    decisions = decide(at_work)
    assert at_work.shape == BatchShape(128, 16)
    assert [str(one) for one in decisions] == ["says: set_batch_size(128, shards=16)"]
    then = Decision("other", "set_batch_size", 160)
    at_work.take([then], VIEW, loop=0)
    assert at_work.shape == BatchShape(160, 16)
    at_work.take([Decision("p", "set_batch_size", 640, shards=64), then], VIEW, loop=0)  # all say it of what there was
    assert at_work.shape == BatchShape(160, 16)


def test_rates_are_others_only_while_the_optimizers_run() -> None:
    at_work = policy_state(Says(("set_learning_rate", 0.3)))
    decide(at_work)
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with at_work.scaled([optimizer]):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.3, 3.0])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]


def test_state_comes_back_with_effects_policies_and_what_was_decided() -> None:
    policy = Says(("set_batch_size", 128))
    at_work = policy_state(policy)
    decide(at_work)
    again = policy_state(back := Says())
    mine, theirs = Registry(), Registry()
    at_work.register(theirs)
    again.register(mine)
    mine.restore(theirs.capture(1), "early")
    assert (again.batch_size, again.digest) == (128, at_work.digest)
    assert back.asked == ["after_step"]


def test_the_number_of_shards_comes_back_unless_the_job_is_another_one() -> None:
    at_work = policy_state(Says(("set_batch_size", (128, 16))))
    decide(at_work)
    again, other = policy_state(), PolicyState([], batch_size=96, shards=12)
    again.load_state_dict(at_work.state_dict())
    other.load_state_dict(at_work.state_dict())
    assert again.shape == BatchShape(128, 16)
    assert other.shape == BatchShape(96, 12)


def test_a_digest_tells_other_decisions_and_not_other_reasons() -> None:
    one, other = Decision("p", "resize", 2, {"x": 1}), Decision("p", "resize", 2, {"x": 2})
    assert decisions_digest([one]) == decisions_digest([other]) > 0
    assert decisions_digest([one]) != decisions_digest([Decision("p", "resize", 3)])
    cuts = {decisions_digest([Decision("p", "set_batch_size", 64, shards=shards)]) for shards in (None, 8, 16)}
    assert len(cuts) == 3
    assert decisions_digest([]) == int(float(decisions_digest([]))) > 0


def test_a_policy_that_fails_and_two_of_one_name_are_named() -> None:
    class Fails(Policy):
        def after_epoch(self, view: View) -> None:
            raise ZeroDivisionError("no")

    with pytest.raises(PolicyError, match="the policy fails failed in after_epoch: ZeroDivisionError: no"):
        policy_state(Fails()).ask("after_epoch", VIEW)
    with pytest.raises(JobError, match="each name once"):
        policy_state(Says(), Says())


@pytest.mark.parametrize("seen", [{"price": [1]}, {3: 4}])
def test_what_a_policy_observes_has_to_be_figures(seen: Any) -> None:
    policy = Policy()
    policy.observe = lambda view: seen  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match="observed"):
        observed(policy, VIEW)


@pytest.mark.parametrize(
    ("verb", "values", "words"),
    [
        ("resize", ("x", 0, True, 1.5), r"\({}\): needs a whole number of workers, at least 1"),
        ("replace", ("x", -1, False), r"\({}\): needs the rank of a worker, a whole number from 0 on"),
        ("set_learning_rate", (1e300, -1, "x", math.nan, 0, True), r"\({}\): needs a rate, a number from 1e-30"),
        ("set_batch_size", (4, 6.5), ""),
        ("set_batch_size", ((128, 12),), r"\(128, shards=12\): .*a multiple of the job's 8 shards, such as 16"),
        ("set_batch_size", ((128, 0), (128, -8), (128, 4), (128, 16.0)), "a multiple of the job's 8 shards"),
        ("set_batch_size", ((64, 128),), r"\(64, shards=128\): a batch has at least as many samples as shards"),
        ("set_topology", ("spiral",), ""),
        ("set_strategy", ("hope",), ""),
        ("set_balance", ("taste",), ""),
    ],
)
def test_a_value_that_a_verb_cannot_have_is_refused_with_the_policy_the_value_and_what_is_allowed(
    verb: Any, values: tuple[Any, ...], words: str
) -> None:
    for value in values:
        said = words.replace("{}", re.escape(short(value)))
        with pytest.raises(PolicyError, match=f"the policy says wants {verb}.*{said}"):
            policy_state(Says((verb, value))).ask("after_step", VIEW)


def test_steps_between_observations_that_are_no_number_of_steps_are_refused_as_the_run_begins() -> None:
    for every in ("x", -1, 1.5, None, True):
        policy = Policy()
        policy.observe_every = every  # type: ignore[assignment]
        with pytest.raises(JobError, match=re.escape(f"observe_every={short(every)}: needs a whole number of steps")):
            policy_state(policy)


def test_fewer_samples_than_the_shards_that_there_are_by_now_are_refused() -> None:
    at_work = policy_state(Says(("set_batch_size", 12)))
    at_work.take([Decision("p", "set_batch_size", 64, shards=16)], VIEW, loop=0)
    with pytest.raises(PolicyError, match=r"at least as many samples as shards \(16\)"):
        at_work.ask("after_step", VIEW)


RULED_OUT = [
    (StrategyConstraints("native"), "parameter-server", "reduction='native' is the backend's own"),
    (StrategyConstraints(compares_bits=True), "diloco", "compare bits, which strategy='diloco' does not promise"),
]


@pytest.mark.parametrize(("constraints", "strategy", "words"), RULED_OUT)
def test_a_strategy_that_the_run_cannot_have_is_refused_from_policies_too(
    constraints: StrategyConstraints, strategy: str, words: str
) -> None:
    at_work = PolicyState([Says(("set_strategy", strategy))], batch_size=64, shards=8, constraints=constraints)
    with pytest.raises(PolicyError, match=rf"the policy says wants set_strategy\('{strategy}'\): .*{words}"):
        at_work.ask("after_step", VIEW)


@pytest.mark.parametrize(("constraints", "strategy", "words"), RULED_OUT)
def test_a_strategy_that_policies_had_chosen_before_is_refused_where_the_run_cannot_have_it(
    constraints: StrategyConstraints, strategy: str, words: str
) -> None:
    at_work = policy_state(Says(("set_strategy", strategy)))
    decide(at_work)
    with pytest.raises(JobError, match=words):
        PolicyState([], batch_size=64, shards=8, constraints=constraints).load_state_dict(at_work.state_dict())


@pytest.mark.parametrize(
    ("constraints", "strategy", "words"), [*RULED_OUT, (StrategyConstraints(), "local-sdg", "no such strategy")]
)
def test_what_a_policy_may_choose_some_day_is_refused_as_the_run_begins(
    constraints: StrategyConstraints, strategy: str, words: str
) -> None:
    policy = StrategyPolicy(workers={1: "all-reduce", 8: strategy})
    with pytest.raises(JobError, match=f"the policy strategy may choose a strategy that cannot be: .*{words}"):
        PolicyState([policy], batch_size=64, shards=8, constraints=constraints)


def test_another_text_for_the_strategy_that_is_in_use_is_no_decision() -> None:
    at_work = PolicyState([StrategyPolicy(workers={1: "local-sgd:every=8"})], 64, 8, strategy=LocalSGD(every=8))
    view = replace(VIEW, strategy=str(at_work.strategy))
    assert at_work.ask("before_train", view) == at_work.ask("after_step", view) == []


def test_policies_have_the_names_of_the_command_line() -> None:
    found = policies_named([*NAMED, "unisono.adapt.view:Policy"], batch_size=64)
    assert [policy.name for policy in found[:-1]] == list(NAMED)
    assert any(policy_state(policy).needs_monitor for policy in found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("greedy", "UNISONO_POLICIES: there is no policy 'greedy': choose of noise-scale"),
        ("a:", "UNISONO_POLICIES='a:': write module:name"),
        ("a:b:c", "UNISONO_POLICIES='a:b:c': write module:name"),
        ("nosuch.module:x", "UNISONO_POLICIES='nosuch.module:x' cannot be imported: ModuleNotFoundError: No module"),
        ("unisono.adapt.view:None_", "UNISONO_POLICIES='unisono.adapt.view:None_': unisono.adapt.view has no "),
        ("math:pi", "UNISONO_POLICIES='math:pi': the policy cannot be made: TypeError: 'float' object is not callable"),
        ("builtins:dict", "UNISONO_POLICIES='builtins:dict': it makes a dict, and no unisono.Policy"),
        ("x" * 5000, "UNISONO_POLICIES: there is no policy 'xxx"),
    ],
)
def test_a_policy_that_is_none_is_refused_with_the_variable_and_what_is_expected(name: str, words: str) -> None:
    with pytest.raises(JobError) as refused:
        policies_named([name], 64, "UNISONO_POLICIES")
    assert str(refused.value).startswith(words)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\nraise RuntimeError('boom')", "RuntimeError: boom ({}:2)"),
        ("exit(0)", "SystemExit: 0 ({}:1)"),
        ("x = (", "SyntaxError: '(' was never closed"),
    ],
)
def test_a_module_that_raises_at_import_is_named_with_its_error_and_line(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_somebody.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(JobError) as refused:
        policies_named(["of_somebody:Own"], 64, "UNISONO_POLICIES")
    said = why.format(tmp_path / "of_somebody.py")
    assert str(refused.value).startswith(f"UNISONO_POLICIES='of_somebody:Own' cannot be imported: {said}")
