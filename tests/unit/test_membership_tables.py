"""Tables of rows with their index: many changes at once are what they are one by one."""

import random
from itertools import product

import pytest

from unisono.membership.messages import Pulse
from unisono.membership.state.state import Phase, Signs, Worker, WorkerTable

pytestmark = pytest.mark.unit

PHASES: tuple[Phase, ...] = ("asked", "ready", "working", "finished")
MARKS = [*product(PHASES, (False, True), (False, True)), *product("ab", ("candidate", "member", "other")), "waits"]


def row(chance: random.Random) -> Worker:
    return Worker(
        f"w{chance.randrange(12)}",
        chance.choice("ab"),
        phase=chance.choice(PHASES),
        leaving=chance.random() < 0.3,
        signs=Signs(connected=chance.random() < 0.5, pulse=Pulse(doing=chance.choice(("call", "wait")))),
    )


def seen(table: WorkerTable) -> object:
    return (
        table,
        list(table),
        [table.count(mark) for mark in MARKS],
        [[worker.id for worker in table.marked(mark)] for mark in MARKS],
        [table.get(f"w{number}") for number in range(12)],
        len(table),
    )


@pytest.mark.parametrize("seed", range(20))
def test_an_open_table_says_at_each_moment_what_one_says_that_took_the_same_rows_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    plain = WorkerTable(row(chance) for _ in range(6))
    for _ in range(4):
        before, opened = seen(plain), plain.opened()
        untouched = plain
        for _ in range(chance.randrange(1, 15)):
            one = row(chance)
            goes = one.id in plain and chance.random() < 0.2
            plain = plain.drop(one) if goes else plain.put(one)
            assert (opened.drop(one) if goes else opened.put(one)) is opened
            assert [opened.count(mark) for mark in MARKS] == [plain.count(mark) for mark in MARKS]
            assert opened.get(one.id) == plain.get(one.id)
            assert (one.id in opened) == (one.id in plain)
            if chance.random() < 0.3:
                assert seen(opened) == seen(plain)
        assert seen(opened.closed()) == seen(plain)
        assert seen(untouched) == before
