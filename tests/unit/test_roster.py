"""What each worker is told of a new generation: together all of it, and each no more than it needs."""

import pytest
from pydantic import ValidationError

from unisono.membership.messages import Neighbour, NewGeneration, Ranks, Target
from unisono.membership.state.roster import MintedGeneration, Seat
from unisono.plan.split import Split
from unisono.train.group.liveness import OtherHosts

pytestmark = pytest.mark.unit


def seat(worker: str, agent: str, acts: int = 0, joins: bool = False, probes: bool = True) -> Seat:
    where = f"{agent}:7" if probes else ""
    return Seat(worker, f"host-{agent}", f"address-{worker}", acts=acts, joins=joins, agent=agent, probes=where)


def generation(number: int, *seats: Seat, source: int = 0) -> MintedGeneration:
    return MintedGeneration(number, seats, Split.even(3 * len(seats) + 1, len(seats)).bounds, source)


def told(new: MintedGeneration, before: MintedGeneration | None = None) -> dict[str, NewGeneration]:
    """By worker; those who are in both come from the one before."""
    survivors = set() if before is None else {each.worker for each in before.roster if not each.joins}
    return {worker: message for workers, message in new.messages(before, survivors) for worker in workers}


def test_everybody_learns_the_shards_the_acts_and_the_joiners_of_all() -> None:
    new = generation(4, seat("w1", "a", acts=7), seat("w3", "b", acts=6), seat("w9", "b", joins=True))
    for message in told(new).values():
        assert message.bounds == new.bounds == (0, 4, 7, 10)
        assert message.acts == [7, 6, 0]
        assert message.joiners == {2}
        assert (message.generation, message.source) == (4, 0)


def test_workers_that_are_alike_are_told_of_together_however_many() -> None:
    seats = [seat(f"w{number}", f"a{number // 8}", acts=5) for number in range(4096)]
    messages = told(generation(2, *seats))
    assert len(messages) == 4096
    assert {len(message.ranks) for message in messages.values()} == {2}, "one of them has a shard more"
    assert max(len(message.model_dump_json()) for name, message in messages.items() if not message.hosts) < 1000


def test_a_worker_is_told_of_those_of_its_own_host_and_of_nobody_else() -> None:
    new = generation(1, seat("w1", "a"), seat("w2", "b"), seat("w3", "a"))
    messages = told(new)
    assert [(one.rank, one.worker, one.address) for one in messages["w3"].here] == [
        (0, "w1", "address-w1"),
        (2, "w3", "address-w3"),
    ]
    assert messages["w3"].here == messages["w1"].here
    assert [one.worker for one in messages["w2"].here] == ["w2"]


def test_one_worker_probes_the_other_hosts_for_its_own() -> None:
    messages = told(generation(1, seat("w1", "a"), seat("w2", "b"), seat("w3", "a"), seat("w4", "c", probes=False)))
    assert messages["w1"].hosts == (Target(agent="b", host="host-b", address="b:7"),)
    assert messages["w2"].hosts == (Target(agent="a", host="host-a", address="a:7"),)
    assert messages["w3"].hosts == messages["w4"].hosts == ()


def test_who_knows_the_generation_before_is_told_of_hosts_that_have_come_and_gone() -> None:
    before = generation(1, seat("w1", "a"), seat("w2", "b"), seat("w3", "c"))
    messages = told(generation(2, seat("w1", "a"), seat("w3", "c"), seat("w4", "d", joins=True)), before)
    news = messages["w1"]
    assert [target.agent for target in news.hosts] == ["d"]
    assert (news.gone, news.hosts_since) == (("b",), 1)
    assert [target.agent for target in messages["w4"].hosts] == ["a", "c"]
    assert messages["w4"].hosts_since == 0


def test_who_speaks_for_its_host_for_the_first_time_is_told_of_all_hosts() -> None:
    before = generation(1, seat("w1", "a"), seat("w2", "a"), seat("w3", "b"))
    messages = told(generation(2, seat("w2", "a"), seat("w3", "b")), before)
    assert ([target.agent for target in messages["w2"].hosts], messages["w2"].hosts_since) == (["b"], 0)
    assert (messages["w3"].hosts, messages["w3"].hosts_since) == ((), 1)


def test_news_that_were_lost_are_told_again_whole() -> None:
    new = generation(2, seat("w1", "a"), seat("w2", "a"), seat("w3", "b"))
    messages = told(new)
    for worker in ("w1", "w2", "w3"):
        assert new.message_for(worker) == messages[worker]


def test_a_worker_keeps_the_hosts_that_it_was_told_of() -> None:
    hosts = OtherHosts()
    before = generation(1, seat("w1", "a"), seat("w2", "b"), seat("w3", "c"))
    after = generation(2, seat("w1", "a"), seat("w3", "c"), seat("w4", "d", joins=True))
    assert [target.agent for target in hosts.of(told(before)["w1"])] == ["b", "c"]
    assert [target.agent for target in hosts.of(told(after, before)["w1"])] == ["c", "d"]
    assert hosts.of(told(after)["w3"].model_copy(update={"hosts": ()})) == []


def test_what_adds_to_a_generation_that_a_worker_does_not_know_is_all_that_it_probes() -> None:
    target = Target(agent="b", host="host-b", address="b:7")
    ranks, here = (Ranks(workers=2, shards=1),), (Neighbour(rank=0, worker="w1"),)
    new = NewGeneration(generation=5, ranks=ranks, here=here, hosts=(target,), hosts_since=4, source=0)
    assert OtherHosts().of(new) == [target]


@pytest.mark.parametrize(
    ("ranks", "rank", "source"),
    [((1,), 1, 0), ((2, 3), 0, 5), ((65536, 1), 0, 0)],
    ids=["a neighbour's rank", "the source", "too many workers"],
)
def test_ranks_that_are_not_there_are_refused(ranks: tuple[int, ...], rank: int, source: int) -> None:
    alike = tuple(Ranks(workers=each, shards=1) for each in ranks)
    with pytest.raises(ValidationError, match="too many, or fewer than a rank that is named"):
        NewGeneration(generation=1, ranks=alike, here=(Neighbour(rank=rank, worker="w1"),), source=source)
