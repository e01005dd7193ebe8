"""Who gets into a page, and how far: the gate, its keys, and every route."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from unisono.jsonl import to_json
from unisono_lab.page.curves import FolderSource
from unisono_lab.page.page_server import (
    FRESH_S,
    HEADERS,
    LARGEST_BODY,
    MOST_READING,
    MOST_SESSIONS,
    MOST_VIEWERS,
    VERBS,
    Gate,
    Keys,
    Page,
    files,
    is_open,
    page_app,
)

pytestmark = pytest.mark.unit

COOKIE = "unisono-1"
OWN: Mapping[str, str] = {}
HOST = "127.0.0.1:4711"


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return json.loads(self.body)[name]


def saying(body: bytes = b"") -> Callable[[], Awaitable[dict[str, Any]]]:
    """What a browser says, which stays then."""
    asked = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in asked:
            return message
        return await asyncio.sleep(3600, {})

    return receive


class Site:
    """A page, called without a socket."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.keys = Keys(lambda: self.now)
        self.page = Page(FolderSource(folder), self.keys, COOKIE)
        self.app = page_app(self.page, self.keys, COOKIE)

    @staticmethod
    def scope(method: str, path: str, headers: Mapping[str, str] = OWN) -> dict[str, Any]:
        told = {"host": HOST, **({} if method == "GET" else {"origin": f"http://{HOST}"}), **headers}
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in told.items() if value]
        return {"type": "http", "method": method, "path": path, "headers": named, "query_string": b"", "root_path": ""}

    def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = OWN) -> Answer:
        """One request, as this very page makes it unless headers say otherwise; an empty one leaves a header out."""
        scope, answer = self.scope(method, path, headers), Answer()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")

        asyncio.run(self.app(scope, saying(body), send))
        return answer

    def enter(self, key: str) -> Answer:
        return self.ask("POST", "/enter", json.dumps({"key": key}).encode())

    def entered(self, key: str) -> dict[str, str]:
        answer = self.enter(key)
        assert answer.status == 200
        return {"cookie": answer.headers["set-cookie"].partition(";")[0], "x_unisono_page": answer["page"]}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "job.json").write_bytes(to_json({"shards": 8}))
    return Site(tmp_path)


def routes(site: Site) -> Iterator[tuple[str, str]]:
    for route in site.page.routes():
        assert isinstance(route, Route)
        yield from ((method, route.path) for method in route.methods or ())


def test_without_a_session_nothing_works_but_the_pages_own_files_and_to_enter(site: Site) -> None:
    walked = {one: site.ask(one[0], one[1]).status for one in routes(site)}
    assert {one for one, status in walked.items() if status != 401} == {
        ("POST", "/enter"),  # 400: without a key
        *((method, path) for path in files() for method in ("GET", "HEAD")),
    }
    assert site.ask("GET", "/nowhere").status == 401
    assert site.ask("PUT", "/").status == 401
    assert {f"/ask/{verb}" for verb in VERBS} < {path for _, path in walked}


def test_the_pages_own_files_hold_nothing_of_the_job_and_lie_nowhere_else(site: Site) -> None:
    for path in ("/web/../gate.py", "/web/%2e%2e/gate.py", "/web/", "/web/uPlot-LICENSE", "//etc/passwd"):
        assert site.ask("GET", path).status == 401, path
    before = {path: content for path, (_, content) in files().items()}
    assert {path: site.ask("GET", path).body for path in files()} == before


@pytest.mark.parametrize("lacks", ["cookie", "x_unisono_page"])
def test_the_cookie_and_the_word_of_the_page_are_both_needed(site: Site, lacks: str) -> None:
    session = site.entered(site.keys.look)
    for wrong in ("", f"{COOKIE}=x" if lacks == "cookie" else "x"):
        assert site.ask("GET", "/share", headers={**session, lacks: wrong}).status == 401
    assert site.ask("GET", "/share", headers=session).status == 403


def test_the_link_to_act_opens_once_and_that_to_look_again_and_again(site: Site) -> None:
    assert site.enter(site.keys.act)["may"] == "act"
    assert site.enter(site.keys.act).status == 401
    assert [site.enter(site.keys.look)["may"] for _ in range(2)] == ["look", "look"]


def test_a_link_that_nobody_used_stops_opening(site: Site) -> None:
    site.now = FRESH_S + 1
    assert site.enter(site.keys.act).status == 401


@pytest.mark.parametrize("key", ["", "x", "é" * 43, "x" * 200, "\x00"])
def test_other_keys_open_nothing(site: Site, key: str) -> None:
    assert site.enter(key).status in (400, 401)


def test_who_may_only_look_cannot_press_a_button(site: Site) -> None:
    session = site.entered(site.keys.look)
    for verb in VERBS:
        assert site.ask("POST", f"/ask/{verb}", b'{"workers": 2, "who": "w1"}', session).status == 403
    assert site.ask("GET", "/share", headers=session).status == 403


def test_who_may_act_is_told_why_nothing_can_be_asked(site: Site) -> None:
    session = site.entered(site.keys.act)
    for verb in VERBS:
        answer = site.ask("POST", f"/ask/{verb}", b'{"workers": 2, "who": "w1"}', session)
        assert (answer.status, "no coordinator" in answer["error"]) == (400, True)
    assert site.ask("GET", "/share", headers=session)["key"] == site.keys.look


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"https://{HOST}"},
        {"origin": "http://127.0.0.1:4712"},
        {"origin": ""},  # none at all
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"host": "evil.example:4711", "origin": "http://evil.example:4711"},  # a name that was pointed here
        {"host": "", "origin": ""},
    ],
)
def test_other_pages_cannot_ask_for_anything_though_the_browser_adds_the_cookie(
    site: Site, headers: dict[str, str]
) -> None:
    session = site.entered(site.keys.act)
    assert site.ask("POST", "/ask/stop", b"{}", {**session, **headers}).status == 403


def test_a_tunnel_may_have_another_port(site: Site) -> None:
    site_of = {"host": "localhost:9000", "origin": "http://localhost:9000"}
    assert site.ask("POST", "/enter", json.dumps({"key": site.keys.look}).encode(), site_of).status == 200


def test_a_cookie_is_for_this_page_alone(site: Site) -> None:
    attributes = site.enter(site.keys.act).headers["set-cookie"].lower()
    assert "httponly" in attributes
    assert "samesite=strict" in attributes


def test_every_answer_confines_the_page(site: Site) -> None:
    for answer in (
        site.ask("GET", "/"),
        site.ask("GET", "/stream"),
        site.enter("x"),
        site.ask("GET", "/", headers={"host": "x"}),
    ):
        assert {name.decode(): value.decode() for name, value in HEADERS}.items() <= answer.headers.items()
    policy = site.ask("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_nothing_of_the_page_comes_from_elsewhere_or_makes_code_of_text() -> None:
    own = {path: content.decode() for path, (_, content) in files().items() if "uPlot" not in path}
    for path, content in own.items():
        assert "<script>" not in content, path
        assert " on" + "click=" not in content, path
        assert not any(word in content for word in ("innerHTML", "outerHTML", "eval(", "insertAdjacent")), path
        assert {word.partition("/")[0] for word in content.split("://")[1:]} <= {"www.w3.org"}, path


def test_requests_are_small_and_closed(site: Site) -> None:
    session = site.entered(site.keys.act)
    assert site.ask("POST", "/ask/resize", b"x" * (LARGEST_BODY + 1), session).status == 413
    for body in (b"", b"[]", b'{"workers": "2"}', b'{"workers": 0}', b'{"other": 1}', b'{"workers": 2e9}', b"{" * 900):
        answer = site.ask("POST", "/ask/resize", body, session)
        assert answer.status == 400, body
        assert body == b"" or "no coordinator" not in answer["error"], body
    assert "no coordinator" not in site.ask("POST", "/ask/resize", b'{"workers": 2, "other": 1}', session)["error"]


def test_who_may_only_look_zooms_in_but_not_without_end(site: Site) -> None:
    session = site.entered(site.keys.look)
    range_ = b'{"axis": "step", "low": 0, "high": 10}'
    assert site.ask("POST", "/finer", range_, session)["curves"] == {}
    for body in (b"", b'{"axis": "loss", "low": 0, "high": 1}', b'{"axis": "step", "low": NaN, "high": 1e999}'):
        assert site.ask("POST", "/finer", body, session).status == 400, body
    site.page.hub.reading = MOST_READING
    assert site.ask("POST", "/finer", range_, session).status == 503


def test_sessions_do_not_grow_for_ever_and_who_may_act_stays(site: Site) -> None:
    owner = site.entered(site.keys.act)
    first = site.entered(site.keys.look)
    for _ in range(MOST_SESSIONS):
        site.keys.enter(site.keys.look)
    assert site.ask("GET", "/share", headers=owner).status == 200
    assert site.ask("GET", "/share", headers=first).status == 401


def test_guesses_are_slowed_down(site: Site) -> None:
    assert {site.enter("x").status for _ in range(400)} == {401, 429}


def test_browsers_that_come_together_are_counted_together(site: Site) -> None:
    session = site.entered(site.keys.look)
    answers: list[int] = []

    async def one() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answers.append(message["status"])

        await site.app(site.scope("GET", "/stream", session), saying(), send)

    async def all_of_them() -> None:
        many = [asyncio.create_task(one()) for _ in range(2 * MOST_VIEWERS)]
        while len(answers) < len(many):
            await asyncio.sleep(0)
        for each in many:
            each.cancel()
        await asyncio.gather(*many, return_exceptions=True)

    asyncio.run(all_of_them())
    assert (answers.count(200), answers.count(503)) == (MOST_VIEWERS, MOST_VIEWERS)
    assert site.page.hub.viewers == 0


def test_who_says_or_takes_nothing_for_long_is_turned_away(site: Site) -> None:
    gate = Gate(site.app, site.keys, COOKIE, is_open, body_s=0.01, take_s=0.01)
    statuses: list[int] = []

    async def nothing() -> dict[str, Any]:
        return await asyncio.sleep(3600, {})

    async def noted(message: Any) -> None:
        statuses.append(message.get("status", 0))

    async def stuck(message: Any) -> None:
        await asyncio.sleep(3600)

    asyncio.run(gate(site.scope("GET", "/"), nothing, noted))
    assert statuses[0] == 408
    with pytest.raises(TimeoutError):
        asyncio.run(gate(site.scope("GET", "/"), saying(), stuck))


def test_whoever_does_not_take_the_news_gives_up_the_place_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    session = site.entered(site.keys.look)
    scope = site.scope("GET", "/stream", session)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise TimeoutError("nobody takes it")

    async def viewers() -> int:
        with pytest.raises(TimeoutError) as kept:  # as a server's log keeps it
            await site.app(scope, saying(), send)
        assert kept.value.__traceback__ is not None
        return site.page.hub.viewers

    assert asyncio.run(viewers()) == 0


def test_each_threat_that_security_names_has_the_tests_that_it_names() -> None:
    root = Path(__file__).parents[2]
    table = (root / "SECURITY.md").read_text().partition("## The page")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    here = re.findall(r"^def test_(\w+)", Path(__file__).read_text(), re.MULTILINE)
    for row in rows:
        named = re.findall(r"`([\w/.]+)(…?)`", row.rpartition("| ")[2] or row.split(" | ")[-1])
        assert named, row
        for name, is_cut in named:
            is_there = (
                (root / name).exists()
                if "/" in name
                else any(one.startswith(name) if is_cut else one == name for one in here)
            )
            assert is_there, name
