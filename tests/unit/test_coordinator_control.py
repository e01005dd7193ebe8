"""Asking a coordinator, as `unisono status`, `resize`, `leave` and `stop` do. A small server stands in for it."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import app as cli
from unisono.cli.jobs import line, table, wait_for_status
from unisono.errors import JobError, LaunchError
from unisono.launch.elastic.address import Address, Control, address_of, find_run
from unisono.membership.token import make_token

pytestmark = pytest.mark.unit

ASKED = {"id": "w12", "rank": None, "host": "", "agent": "agent-1", "phase": "asked"}
NOWHERE = {"connected": False, "leaving": False, "step": 0, "samples_per_s": 0.0}


def member(rank: int) -> dict[str, Any]:
    place = {"id": f"w{rank + 1}", "rank": rank, "host": "a", "agent": "agent-1", "phase": "working"}
    return {**place, "connected": rank == 0, "leaving": rank == 1, "step": 120 + rank, "samples_per_s": 1520.4}


STATUS: dict[str, Any] = {
    "generation": 3,
    "phase": "training",
    "wanted": 3,
    "smallest": 2,
    "largest": 8,
    "members": [member(0), member(1)],
    "others": [{**ASKED, **NOWHERE}],
    "agents": [{"agent": "agent-1", "host": "a", "workers": 8, "connected": True, "leaving": False, "left_out": ""}],
    "excluded": [],
    "over": None,
}


class Stand(BaseHTTPRequestHandler):
    """Answers with the status, or refuses, and remembers what it was asked."""

    asked: list[tuple[str, str, object]]
    token: str

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.asked.append((self.command, self.path, body))
        allowed = self.headers.get("Authorization") == f"Bearer {self.token}"
        too_many = isinstance(body, dict) and body.get("workers", 0) > 8
        status = 401 if not allowed else 409 if too_many else 200
        found = {200: STATUS, 409: {"error": "8 shards: at most 8 workers"}, 401: {"error": "the token is wrong"}}
        data = json.dumps(found[status]).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder with a coordinator, below ``runs`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    Stand.token, Stand.asked = make_token(folder), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stand)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    (folder / "coordinator.json").write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}", "pid": 1}))
    try:
        yield folder
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def unisono(*args: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["unisono", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


class Late:
    """A coordinator that answers the third question, or refuses it."""

    def __init__(self, answer: Exception | dict[str, Any]) -> None:
        self.answer, self.asked = answer, 0

    def status(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked < 3:
            raise LaunchError("nobody answers")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_who_joins_waits_for_a_coordinator_that_does_not_answer_yet_if_told_to() -> None:
    late: Any = Late(STATUS)
    with pytest.raises(LaunchError, match="nobody answers"):
        wait_for_status(late, 0)
    assert wait_for_status(late, 60, 0) == STATUS
    refusing: Any = Late(JobError("the token is wrong"))
    with pytest.raises(JobError, match="the token is wrong"):
        wait_for_status(refusing, 60, 0)
    assert refusing.asked == 3


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        (["status"], ("GET", "/status", None)),
        (["resize", "3"], ("POST", "/resize", {"workers": 3})),
        (["leave", "w3"], ("POST", "/leave", {"who": "w3"})),
        (["leave", "0"], ("POST", "/leave", {"who": "0"})),
        (["stop"], ("POST", "/stop", {})),
    ],
)
def test_a_command_asks_the_only_job_that_runs_and_shows_its_status(
    run_dir: Path, capsys: pytest.CaptureFixture[str], args: list[str], asked: tuple[str, str, object]
) -> None:
    assert unisono(*args) == 0
    assert Stand.asked == [asked]
    assert capsys.readouterr().out.startswith("training, generation 3: 2 of 3 workers (2:8)\n")


@pytest.mark.parametrize(
    "words", [["resize", "URL", "--token-file", "FILE", "3"], ["resize", "URL", "3", "--token-file", "FILE"]]
)
def test_a_job_elsewhere_is_named_by_its_url(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    meant = {"URL": json.loads((run_dir / "coordinator.json").read_text())["url"], "FILE": str(run_dir / "token")}
    (run_dir / "coordinator.json").unlink()
    assert unisono(*[meant.get(word, word) for word in words]) == 0
    assert Stand.asked == [("POST", "/resize", {"workers": 3})]
    assert capsys.readouterr().out.startswith("training")


def test_options_may_stand_between_the_url_and_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script := tmp_path / "train.py").touch()
    options = ["-n", "2", "--token-file", str(tmp_path / "none")]
    assert unisono("join", "https://127.0.0.1:1", *options, str(script), "-n", "x") == 2
    assert "the token of the job cannot be read" in capsys.readouterr().err
    assert unisono("join", "-n", "2", str(script)) == 2
    assert "which job?" in capsys.readouterr().err


def test_the_status_has_a_line_for_each_worker_and_agent_and_says_who_was_left_out_and_why() -> None:
    left_out = {**STATUS["agents"][0], "left_out": "a does not reach b at b:7: nobody answers"}
    found = {**STATUS, "agents": [left_out], "excluded": [{"worker": "w3", "host": "c", "why": "it did not form"}]}
    assert table(found).splitlines() == [
        "training, generation 3: 2 of 3 workers (2:8)",
        "worker  rank  host  phase                            step  samples/s",
        "w1      0     a     working                          120   1520",
        "w2      1     a     working, leaving, not connected  121   1520",
        "w12                 asked",
        "agent-1 on a: room for 8, left out: a does not reach b at b:7: nobody answers",
        "w3 on c was excluded: it did not form",
    ]
    assert line({**STATUS, "over": {"digest": "abc", "reason": "", "preempted": False}}) == "over: done"
    assert line({**STATUS, "over": {"digest": "", "reason": "w1 failed", "preempted": False}}) == "over: w1 failed"


def test_the_status_for_programs_is_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono("status", "--json", "--run-dir", str(run_dir)) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_a_refusal_is_one_line_and_exit_code_2(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono("resize", "99") == 2
    assert capsys.readouterr().err == "unisono: error: 8 shards: at most 8 workers\n"


def test_a_wrong_token_is_an_error(run_dir: Path) -> None:
    where = address_of(run_dir)
    with pytest.raises(JobError, match="the token is wrong"):
        Control(Address(where.url, "another")).status()


def test_a_coordinator_that_is_gone_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1:1 does not answer .*does the job still run"):
        Control(Address("http://127.0.0.1:1", "token")).status()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://127.0.0.1:-1", f"https://{'x' * 70}:1"]
)
def test_what_is_no_address_is_one_line_and_exit_code_2(
    url: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unisono("status", url, "--token-file", str(run_dir / "token")) == 2
    assert f"error: {url} is no address of a coordinator" in capsys.readouterr().err


def test_another_service_that_answers_is_no_coordinator(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STATUS, "members")
    with pytest.raises(LaunchError, match="no coordinator of this version"):
        Control(address_of(run_dir)).status()


def test_without_a_job_there_is_nothing_to_ask(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no elastic job runs in .*--run-dir"):
        find_run(None, tmp_path)
    with pytest.raises(JobError, match=r"no elastic job runs in .*\(there is no coordinator\.json in it\)"):
        address_of(tmp_path)


def test_of_several_jobs_one_has_to_be_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "coordinator.json").write_text("{}")
    with pytest.raises(JobError, match=f"several elastic jobs run: .*\n  {tmp_path}/a\n  {tmp_path}/b"):
        find_run(None, tmp_path)
    assert find_run(tmp_path / "b", tmp_path) == tmp_path / "b"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"url"'])
def test_a_damaged_address_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "coordinator.json").write_text(text)
    with pytest.raises(JobError, match=r"coordinator\.json cannot be read"):
        address_of(tmp_path)


def test_the_token_goes_to_no_other_host_without_tls(tmp_path: Path) -> None:
    make_token(tmp_path)
    private_ones = ("https://10.0.0.1:1", "http://[::1]:1", "http://127.0.0.1:1", "http://localhost:1")
    others = ("http://10.0.0.1:1", "http://127.0.0.1.example.org", "ftp://127.0.0.1", "http://[")
    for url, private in (*((each, True) for each in private_ones), *((each, False) for each in others)):
        (tmp_path / "coordinator.json").write_text(json.dumps({"url": url}))
        if private:
            assert address_of(tmp_path).url == url
        else:
            with pytest.raises(JobError, match="reached over https"):
                address_of(tmp_path)
