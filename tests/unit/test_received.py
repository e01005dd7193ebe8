"""What is shown of a value that came from outside."""

import pytest

from unisono.errors import JobError
from unisono.job import Job
from unisono.received import LONGEST_SHOWN, short
from unisono.sync import LocalSGD, strategy_of

pytestmark = pytest.mark.unit


def test_a_path_and_a_setting_are_shown_whole() -> None:
    for value in ("/a" * 60, "parameter-server:synchronous=false,max_staleness=8", 1.5, True, None, ["a", 1]):
        assert short(value) == repr(value)


@pytest.mark.parametrize(
    "value", ["x" * 5000, b"x" * 5000, ["x" * 5000] * 9, 10**4000, 10**5000, -(10**5000)], ids=range(6)
)
def test_a_value_of_thousands_of_characters_is_shown_shortened(value: object) -> None:
    assert len(short(value)) < 10 * LONGEST_SHOWN


@pytest.mark.parametrize("value", ["x" * 5000, 10**5000], ids=["text", "number"])
def test_the_refusal_of_a_long_value_is_short_and_names_the_setting(value: object) -> None:
    for name in ("batch_size", "shards", "seed", "threads", "precision"):
        with pytest.raises(JobError, match=f"{name}=") as refused:
            Job.create(**{"batch_size": 32, name: value})  # type: ignore[arg-type]
        assert len(str(refused.value)) < 3 * LONGEST_SHOWN
    with pytest.raises(JobError, match="every=") as refused:
        LocalSGD(every=value)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 3 * LONGEST_SHOWN


def test_the_numbers_of_a_strategy_have_plain_digits() -> None:
    assert strategy_of("local-sgd:every=4") == LocalSGD(every=4)
    for text in ("\u0664", "4_0", "nan"):
        with pytest.raises(JobError, match="every="):
            strategy_of(f"local-sgd:every={text}")


def test_the_refusal_of_a_long_strategy_is_short() -> None:
    for text in ("x" * 5000, "local-sgd:" + "x" * 5000, "local-sgd:every=" + "x" * 5000):
        with pytest.raises(JobError) as refused:
            strategy_of(text)
        assert len(str(refused.value)) < 4 * LONGEST_SHOWN
