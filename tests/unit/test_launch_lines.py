import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.launch.terminal import LineSplitter

pytestmark = pytest.mark.unit


def lines_of(*chunks: bytes, longest: int = 1000, apart_s: float = 10.0) -> list[str]:
    splitter = LineSplitter(longest=longest)
    lines = []
    for number, chunk in enumerate(chunks):
        lines += splitter.feed(chunk, now=number * apart_s)
    return lines + splitter.flush()


def test_a_line_is_given_when_it_is_complete() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw", 0.0) == ["one"]
    assert splitter.feed(b"o\n\nthree\n", 0.0) == ["two", "", "three"]
    assert splitter.flush() == []


@pytest.mark.parametrize("chunks", [(b"a\r\nb\r\n",), (b"a\r", b"\nb", b"\r\n")])
def test_a_line_may_end_as_on_other_systems_even_cut_in_two(chunks: tuple[bytes, ...]) -> None:
    assert lines_of(*chunks) == ["a", "b"]


def test_updates_of_a_progress_bar_are_shown_once_a_second_and_at_the_end() -> None:
    assert lines_of(b"\r 1%", b"\r 2%", b"\r 3%", b"\r100%\ndone\n", apart_s=0.4) == [" 1%", "100%", "done"]
    assert lines_of(b"1%\r", b"2%\r", b"3%\r", b"4%\r", apart_s=0.4) == ["1%", "4%"]
    assert lines_of(b"1%\r", b"2%\r", b"3%\r", apart_s=1.0) == ["1%", "2%", "3%"]


def test_a_skipped_update_comes_when_nothing_follows_it() -> None:
    assert lines_of(b"1%\r2%\r3%\r") == ["1%", "3%"]
    splitter = LineSplitter()
    assert splitter.feed(b"1%\r2%\r\r", 0.0) == ["1%"]
    assert splitter.flush() == ["2%"]


def test_bytes_that_are_no_text_are_marked() -> None:
    assert lines_of(b"ok \xff\xfe\n", "größe\n".encode()) == ["ok \ufffd\ufffd", "größe"]


def test_a_very_long_line_comes_in_pieces_and_memory_stays_bounded() -> None:
    splitter = LineSplitter(longest=10)
    assert splitter.feed(b"x" * 25, 0.0) == ["x" * 10, "x" * 10]
    assert splitter.feed(b"yy\n", 0.0) == ["xxxxxyy"]
    assert lines_of(b"x" * 25 + b"\n", longest=10) == ["x" * 10, "x" * 10, "x" * 5]


def test_pieces_of_a_long_line_keep_characters_whole() -> None:
    assert lines_of("äöü€😀".encode() * 9 + b"\n", longest=8)
    assert "".join(lines_of("äöü€😀".encode() * 9, longest=8)) == "äöü€😀" * 9


@given(st.lists(st.text(alphabet="aß€😀 ", max_size=30), max_size=8), st.lists(st.integers(1, 7), min_size=1))
def test_the_lines_do_not_depend_on_how_the_bytes_come(texts: list[str], sizes: list[int]) -> None:
    data = "".join(f"{text}\n" for text in texts).encode()
    chunks: list[bytes] = []
    start = 0
    while start < len(data):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(data[start : start + size])
        start += size
    assert lines_of(*chunks) == texts


@given(st.binary(max_size=200), st.integers(4, 40))
def test_no_byte_stops_it_and_no_piece_is_longer_than_allowed(data: bytes, longest: int) -> None:
    assert all(len(line) <= longest for line in lines_of(data, longest=longest))
