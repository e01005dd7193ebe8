"""Hosts as people write them, and what becomes of them."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.cli.run_command import HostOptions
from unisono.errors import JobError
from unisono.launch.elastic.address import HostHello, HostOrder, version
from unisono.launch.elastic.host_agents import passed_on
from unisono.launch.engine import Engine, Ssh, engine_named, explanation, reach
from unisono.launch.hostfile import HostPlan, HostSlots, is_here, parse_hostfile, read_hosts

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", 1)]),
        ("a:4,b:2", [("a", 4), ("b", 2)]),
        ("me@a:4, b", [("me@a", 4), ("b", 1)]),
        ("10.0.0.1:2,[fd00::1]:3,[fd00::2]", [("10.0.0.1", 2), ("fd00::1", 3), ("fd00::2", 1)]),
        ("a,b,a:2", [("a", 3), ("b", 1)]),
    ],
)
def test_a_list_of_hosts_is_read(text: str, hosts: list[tuple[str, int]]) -> None:
    assert list(read_hosts(text)) == [HostSlots(*host) for host in hosts]


def test_hostfiles_of_mpi_of_deepspeed_of_windows_and_plain_ones_are_read(tmp_path: Path) -> None:
    text = "# ours\nworker-1 slots=4\nworker-2 slots=2 max_slots=8  # spot\n\n\tme@c:3\nd\nd slots=2\n[::1] slots=1\n"
    (tmp_path / "hosts").write_text(text)
    found = {host.name: host.slots for host in read_hosts(str(tmp_path / "hosts"))}
    assert found == {"worker-1": 4, "worker-2": 2, "me@c": 3, "d": 3, "::1": 1}
    (tmp_path / "windows").write_bytes(b"\xef\xbb\xbfa:4\r\n# ours\r\nb slots=2\r\n")
    assert list(read_hosts(str(tmp_path / "windows"))) == [HostSlots("a", 4), HostSlots("b", 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb slots 4\n", "hosts, line 2: 'slots': write 'host', 'host:4' or 'host slots=4'"),
        ("a slots=many\n", "hosts, line 1: 'slots=many': 'many' is no number of workers"),
        ("a\n\nb:0\n", "hosts, line 3: 'b:0': '0' is no number of workers; write one from 1 to 4096"),
        ("a:2 slots=2\n", "hosts, line 1: .* says twice how many slots there are"),
        ("-oProxyCommand=rm slots=2\n", "hosts, line 1: '-oProxyCommand=rm' is no host"),
        ("a;reboot\n", "line 1: 'a;reboot' is no host"),
        ("fd00::1\n", r"line 1: 'fd00::1' is no host: .*\[fd00::1\]:4"),
        ("a\nb\x1b[2J slots=2\n", r"line 2: 'b\\x1b\[2J' is no host"),
        ("# nobody\n", "the hostfile hosts: there is no host in it"),
        ("a\nb\n" * 4097, "the hostfile hosts: a has more than 4096 slots"),
    ],
)
def test_a_line_that_is_none_is_named(text: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        parse_hostfile(text, "hosts")


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"a\xff\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "long").write_bytes(b"a\n" * 10**6)
    for name, words in (
        ("no", "there is no such hostfile"),
        ("no" * 200, "there is no such hostfile"),
        ("binary", "cannot be read"),
        ("pipe", "that is no file; write the hosts into one"),
        ("folder", "that is no file; write the hosts into one"),
        ("long", "has more than 1048576 bytes"),
    ):
        with pytest.raises(JobError, match=words):
            read_hosts(str(tmp_path / name))


@given(st.text(max_size=40))
def test_no_text_becomes_an_option_of_ssh(text: str) -> None:
    try:
        found = parse_hostfile(text, "hosts")
    except JobError:
        return
    assert all(not host.name.startswith("-") and not set(host.name) & set(" \t\n;&|$`'\"\\") for host in found)


def test_workers_go_to_the_first_hosts_and_to_the_launchers_own_before_all_others() -> None:
    hosts = [HostSlots("a", 2), HostSlots("here", 3), HostSlots("b", 4)]
    placement = HostPlan.of(hosts, lambda name: name == "here", Ssh())
    assert placement == HostPlan(3, (HostSlots("a", 2), HostSlots("b", 4)))
    assert placement.room == 9
    assert placement.first(4) == HostPlan(3, (HostSlots("a", 1),))
    assert placement.first(6) == HostPlan(3, (HostSlots("a", 2), HostSlots("b", 1)))
    assert placement.first(2) == HostPlan(2, ())


def test_this_host_is_known_by_its_names_and_addresses() -> None:
    assert [is_here(name) for name in ("localhost", "127.0.0.1", "::1", "192.0.2.1", "me@localhost")] == [
        *(True, True, True, False, False)
    ]


# --- ssh


def test_the_words_of_ssh_have_the_persons_options_first_and_nothing_of_the_job() -> None:
    words = Ssh("ssh -p 2222 -i 'a key'", "/usr/bin/python3").command("me@a", 30)
    assert words[:5] == ["ssh", "-p", "2222", "-i", "a key"]
    assert words[-3:] == ["-T", "me@a", "exec /usr/bin/python3 -P -m unisono.cli.over_ssh"]
    assert "ServerAliveInterval=10" in words


@pytest.mark.parametrize(("command", "python"), [("", "python"), ("ssh 'a", "python"), ("ssh", "-c"), ("ssh", "")])
def test_a_command_that_cannot_be_is_refused(command: str, python: str) -> None:
    with pytest.raises(JobError, match="--ssh|--python"):
        Ssh(command, python)


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (255, "Host key verification failed.", "log in once with 'ssh me@a', compare the fingerprint"),
        (255, "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @", "'ssh-keygen -R a'"),
        (255, "me@a: Permission denied (publickey).", "'ssh-copy-id me@a'"),
        (255, "ssh: Could not resolve hostname a: Name or service not known", "nobody knows that name"),
        (255, "ssh: connect to host a port 22: Connection refused", "cannot be reached: is it up, does sshd run there"),
        (255, "Bad owner or permissions on /home/me/.ssh/config", "ssh has failed (it says: 'Bad owner"),
        (127, "bash: line 1: python9: command not found", "there is no python9 that runs there: name the interpreter"),
        (1, "python9: Error while finding module specification for 'unisono.cli.over_ssh' (ModuleNotFoundError: No "
            "module named 'unisono')", "there is no Unisono for python9 there: install the same version"),
        (1, "python9: No module named unisono.cli.over_ssh", "its Unisono is too old there"),
        (2, "Unknown option: -P", "python9 or its Unisono is too old there"),
        (3, "", "its agent ended with exit code 3"),
    ],
)  # fmt: skip
def test_what_ssh_says_becomes_what_to_do(code: int, said: str, words: str) -> None:
    assert words in Ssh(python="python9").explain("me@a", code, [said] if said else [])


# --- what is told


def test_a_host_is_told_all_on_one_line_and_takes_nothing_else() -> None:
    order = HostOrder(
        "https://h:7", True, "secret", "PEM", "/x\udcff", "agent-1", ("-n", "2", "train.py"), {"A": "b\nc"}
    )
    line = order.to_line()
    assert line.count(b"\n") == 1
    assert HostOrder.from_line(line) == order
    assert "secret" not in repr(order)
    for wrong in (b"{}", b"[]", line.replace(b'"secret"', b"5"), line.replace(b'"url"', b'"uri"')):
        with pytest.raises(ValueError, match="order"):
            HostOrder.from_line(wrong)


def test_the_coordinator_is_called_where_the_host_sees_the_launcher_unless_the_person_says_where() -> None:
    seen = HostOrder("https://here:7777", True, "", "", "/", "", ())
    assert seen.url_from("10.0.0.1 50000 10.0.0.2 22") == "https://10.0.0.1:7777"
    assert seen.url_from("fe80::1%eth0 50000 fe80::2 22") == "https://[fe80::1]:7777"
    assert seen.url_from("") == "https://here:7777"
    assert HostOrder("https://h:7", False, "", "", "/", "", ()).url_from("10.0.0.1 5 10.0.0.2 22") == "https://h:7"


def test_a_hello_is_known_among_other_lines_and_another_version_is_an_obstacle() -> None:
    hello = HostHello.of_this_host()
    assert HostHello.from_line(hello.to_line()) == hello
    assert hello.obstacle() == ""
    assert [
        HostHello.from_line(line) for line in ("Welcome!", "unisono-host", "unisono-host {}", "unisono-host 5")
    ] == [*[None] * 4]
    assert f"it has Unisono '0.0.9', and this host {version()}" in HostHello("0.0.9", "3.11").obstacle()


def test_hosts_get_our_variables_and_those_that_are_named() -> None:
    here = {"UNISONO_SHARDS": "4", "OMP_PROC_BIND": "1", "HOME": "/me"}
    here |= {"UNISONO_RUN_DIR": "x", "UNISONO_TOKEN_FILE": "t"}
    assert passed_on(here) == {"UNISONO_SHARDS": "4", "OMP_PROC_BIND": "1"}
    assert HostOptions(env=["HOME", "X=a=b"]).variables(here) == {"HOME": "/me", "X": "a=b"}
    for wrong, words in (("NOBODY", "there is no such variable here"), ("a b=1", "write NAME, or NAME=value")):
        with pytest.raises(JobError, match=words):
            HostOptions(env=[wrong]).variables(here)


LACKS_PYDANTIC = """
import sys
sys.modules["pydantic_core"] = None
from unisono.cli.over_ssh import main
main()
"""


def test_a_host_whose_packages_are_for_another_python_says_so_in_one_line(tmp_path: Path) -> None:
    order = HostOrder("https://127.0.0.1:9", True, "x" * 43, "", str(tmp_path), "agent-1", ("train.py",))
    command = [sys.executable, "-c", LACKS_PYDANTIC]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe) as host:
        assert host.stdin is not None
        assert host.stderr is not None
        host.stdin.write(order.to_line())
        host.stdin.flush()  # and open: at its end the host would be told to leave
        said = host.stderr.read().decode()
    assert host.returncode == 2
    assert said.startswith(f"unisono: error: Python {platform.python_version()} ({sys.executable}) lacks what Unisono")
    assert said.count("\n") == 1


# --- the launcher's own limits


STARTS_MANY = """
import resource, sys
from pathlib import Path
from unisono.checkpoint.folder import RunFolder
from unisono.cli.run_command import HostOptions
from unisono.errors import JobError
from unisono.launch.elastic.elastic_settings import ElasticSettings, Range
from unisono.launch.hostfile import HostPlan, HostSlots
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal import Terminal
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
settings = ElasticSettings(LaunchSettings(Script("train.py")), Range(1, 1000))
hosts = HostPlan(0, tuple(HostSlots(f"h{number}") for number in range(1000)))
try:
    HostOptions().agents(hosts, settings, RunFolder(Path("run")), Terminal.of_this_process())
except JobError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "said"),
    [
        (4500, "4256\n"),
        (1024, "--hosts: 1000 hosts take 4256 open files here, and the system allows 1024: raise the limit (ulimit"),
    ],
)
def test_a_launcher_of_many_hosts_may_open_files_enough_or_says_so_before_it_starts_any(
    hard: int, said: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STARTS_MANY, str(hard)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said)


class Broken(Engine):
    """An engine of somebody's, with mistakes."""

    def command(self, host: str, silence_s: float) -> list[str]:
        if host == "nothing":
            return []
        raise KeyError(host)

    def address(self, host: str) -> str:
        raise KeyError(host)

    def explain(self, host: str, code: int, lines: Sequence[str]) -> str:
        raise KeyError(host)


def test_an_engine_that_fails_is_named_with_its_method_and_the_host() -> None:
    engine = engine_named(f"{__name__}:Broken", "ssh", "python")
    with pytest.raises(JobError, match=r"the engine fails: Broken.command\('a', 3\): KeyError"):
        reach(engine, "a", 3)
    with pytest.raises(JobError, match=r"Broken.command\('nothing'\) has returned \[\]: return a list of words"):
        reach(engine, "nothing", 3)
    with pytest.raises(JobError, match=r"the engine fails: Broken.address\('a'\): KeyError"):
        _ = HostPlan(0, (HostSlots("a", 1),), engine).towards
    assert "the engine fails: Broken.explain('a', 1, []): KeyError" in explanation(engine, "a", 1, [])
    with pytest.raises(JobError, match="Engine is no whole engine: it has no method command"):
        reach(Engine(), "a", 3)


@pytest.mark.parametrize(
    ("name", "ssh", "words"),
    [
        ("builtins:dict", "ssh", "is no subclass of unisono.Engine"),
        (f"{__name__}:Broken", "ssh -p 2", "--ssh with --on .*: the engine reaches the hosts instead of ssh"),
    ],
)
def test_what_cannot_reach_hosts_is_refused(name: str, ssh: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        engine_named(name, ssh, "python")
