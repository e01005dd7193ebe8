import asyncio
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from uvicorn.config import Config
from uvicorn.server import ServerState
from websockets.asyncio.client import connect

from said import options
from unisono.errors import JobError
from unisono.host.certificate import Certificate
from unisono.launch.elastic.address import Address, Whereabouts, address_of, distrusted
from unisono.launch.elastic.coordinator_process import Listening, invitation, server_command
from unisono.launch.elastic.elastic_settings import ElasticSettings, Entrance, Range, certificate_file, make_certificate
from unisono.launch.settings import LaunchSettings, Script
from unisono.membership import reception, server
from unisono.membership.messages import Neighbour, NewGeneration, Ranks
from unisono.membership.token import context_for, make_token, read_token, token_file
from unisono.reduce.data_network import NetworkKeys
from unisono.reduce.peers import PeerListener
from unisono.train.group.meeting import ElasticRendezvous

pytestmark = pytest.mark.unit

with_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


# --- what the person says


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [(":0", "", 0), ("node1:7777", "node1", 7777), ("10.0.0.1:1", "10.0.0.1", 1), ("[::1]:65535", "::1", 65535)],
)
def test_where_a_coordinator_listens_is_read(text: str, host: str, port: int) -> None:
    found = Entrance.read(text)
    assert (found.host, found.port, found.certificate) == (host, port, None)


@pytest.mark.parametrize(
    "text", ["", "node1", "7777", "node1:", "node1:x", "node1:65536", "node1:-1", "a:٣", "::1:7777"]
)
def test_what_is_no_such_place_is_named(text: str) -> None:
    with pytest.raises(JobError, match="--coordinator .*write"):
        Entrance.read(text)


def test_a_token_and_a_name_that_were_made_beforehand_are_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    token = make_token(tmp_path)
    entrance = Entrance.read(":0").prepared(token_file(tmp_path), "job-coordinator-0-0.job")
    for _ in range(2):  # at each start
        assert entrance.token(tmp_path / "run") == token == read_token(token_file(tmp_path / "run"))
    with entrance.listen(1) as listening:
        assert entrance.name(listening) == "job-coordinator-0-0.job"


def test_what_was_made_beforehand_is_for_a_coordinator_that_others_reach(tmp_path: Path) -> None:
    for file, name in ((tmp_path, None), (None, "a")):
        with pytest.raises(JobError, match="--token-file and --known-as are for"):
            Entrance().prepared(file, name)
    for name in ("", "a:1", "a/b", "-a", "a b", "ü"):
        with pytest.raises(JobError, match="--known-as .*write the name of a host"):
            Entrance.read(":0").prepared(None, name)
    with pytest.raises(JobError, match="token of the job cannot be read"):
        Entrance.read(":0").prepared(tmp_path / "nowhere", None).token(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of root's needs root")
@pytest.mark.parametrize(("owner", "mode", "is_read"), [(0, 0o440, True), (0, 0o444, False), (65534, 0o440, False)])
def test_a_token_that_root_shares_with_a_group_is_read_by_others(
    owner: int, mode: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = make_token(tmp_path)
    token_file(tmp_path).chmod(mode)
    os.chown(token_file(tmp_path), owner, 65534)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    if is_read:
        assert read_token(token_file(tmp_path)) == token
    else:
        with pytest.raises(JobError, match="others can read the token"):
            read_token(token_file(tmp_path))


def test_a_certificate_goes_with_its_key_and_with_a_coordinator(tmp_path: Path) -> None:
    chain, key = tmp_path / "c", tmp_path / "k"
    with pytest.raises(JobError, match="belong together"):
        Entrance.read(":0", chain)
    with pytest.raises(JobError, match="say where with --coordinator"):
        Entrance.read(None, chain, key)
    assert Entrance.read(":0", chain, key).certificate == Certificate(chain, key)


# --- where it listens


def test_without_a_word_only_this_host_reaches_it_and_nothing_is_made(tmp_path: Path) -> None:
    entrance = Entrance.read(None)
    with entrance.listen(1) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
        assert entrance.certificate_for(tmp_path, entrance.name(listening)) is None
    assert not list(tmp_path.iterdir())


def test_a_name_that_means_loopback_here_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: there)
    with pytest.raises(JobError, match=r"--coordinator node1: on this host that is 127\.0\.1\.1, which no other host"):
        Entrance("node1").listen(1)


def test_a_port_that_another_job_has_and_an_address_of_another_host_are_named() -> None:
    with Entrance().listen(1) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"port {port}: .*in use.* --coordinator 127.0.0.1:0 takes a free"):
            Entrance(port=port).listen(1)
    for host, words in (("192.0.2.1", "192.0.2.1, port 0: .*or :PORT for all of them"), ("ü" * 70, "")):
        with pytest.raises(JobError, match=f"cannot listen on {words}"):
            Entrance(host).listen(1)


def test_clients_are_told_the_name_that_the_person_said_and_it_is_let_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        where = reception.ListenAddress(names=("Node1",))
        assert reception.url(listening, where, tls=True) == f"https://Node1:{port}"
        assert f"node1:{port}" in reception.hosts(listening, where)
    assert Listening(3, "::1", Certificate(Path("c"), Path("k"))).url(1) == "https://[::1]:1"


def test_the_coordinator_is_told_of_its_certificate(tmp_path: Path) -> None:
    settings = ElasticSettings(LaunchSettings(Script("train.py")), Range(1, 2))
    listening = Listening(9, "node1", Certificate(tmp_path / "c", tmp_path / "k"))
    told = server._arguments(list(server_command(settings, tmp_path, listening, fresh=True)[1:]))
    assert (told.fd, told.name, told.tls_cert, told.tls_key) == (9, ["node1"], tmp_path / "c", tmp_path / "k")


# --- certificates


@pytest.fixture
def own(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path, ["node1", "10.0.0.1"])


def is_believed(shown: Certificate, trusted: Path | None, host: str = "elsewhere") -> bool:
    """Whether a handshake succeeds, without a network."""
    try:
        return shakes_hands(context_for(f"https://{host}:1", trusted), served(shown), host)
    except ssl.SSLCertVerificationError:
        return False


def served(shown: Certificate) -> ssl.SSLContext:
    serves = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serves.load_cert_chain(shown.chain, shown.key)
    return serves


def shakes_hands(calls: ssl.SSLContext | None, serves: ssl.SSLContext | None, host: str = "elsewhere") -> bool:
    assert calls is not None
    assert serves is not None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = calls.wrap_bio(back, there, server_hostname=host)
    peer = serves.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for side in (client, peer):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client.cipher() is not None


@with_openssl
def test_a_certificate_is_made_once_and_its_key_is_for_nobody_else(tmp_path: Path, own: Certificate) -> None:
    before = own.chain.read_bytes(), own.key.read_bytes()
    assert stat.S_IMODE(own.key.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["certificate.key", "certificate.pem"]
    again = make_certificate(tmp_path, ["another"])
    assert (again.chain.read_bytes(), again.key.read_bytes()) == before
    own.key.chmod(0o640)
    with pytest.raises(JobError, match="others can read the key"):
        make_certificate(tmp_path, [])


@with_openssl
def test_a_certificate_of_its_own_is_believed_by_any_name_and_no_other_is(own: Certificate, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other", ["node1"])
    assert is_believed(own, own.chain)
    assert not is_believed(other, own.chain)
    assert not is_believed(own, None)


@with_openssl
def test_nobody_is_believed_because_a_pinned_certificate_vouches_for_it(own: Certificate, tmp_path: Path) -> None:
    forged = signed(tmp_path, "elsewhere", own)
    assert not is_believed(forged, own.chain)


@with_openssl
def test_an_authority_vouches_for_a_name_only(tmp_path: Path) -> None:
    authority = signed(tmp_path, "authority", None)
    node = signed(tmp_path, "node1", authority)
    assert is_believed(node, authority.chain, "node1")
    assert not is_believed(node, authority.chain, "node2")


@with_openssl
def test_clocks_decide_nothing_about_a_pinned_certificate(tmp_path: Path) -> None:
    pinned = of_the_future(tmp_path, "CA:FALSE")
    assert is_believed(pinned, pinned.chain)
    network = NetworkKeys("secret", pinned.chain.read_text() + pinned.key.read_text())
    assert shakes_hands(network.context(calls=True), network.context(calls=False))


@with_openssl
def test_they_do_about_an_authority_and_the_person_is_told_what_its_clock_shows(tmp_path: Path) -> None:
    authority = of_the_future(tmp_path, "CA:TRUE")
    node = signed(tmp_path, "node1", authority)
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        shakes_hands(context_for("https://node1:1", authority.chain), served(node), "node1")
    words = str(distrusted(Address("https://node1:1", "", authority.chain), refused.value))
    assert re.search(r"not yet valid.* Is the clock of this host right\? It shows 20\d\d-", words)


OF_THE_FUTURE = """\
[req]
prompt = no
distinguished_name = who
[who]
CN = node1
[ca]
default_ca = here
[here]
database = {folder}/index
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = what
[any]
commonName = supplied
[what]
basicConstraints = critical, {constraint}
"""


def of_the_future(folder: Path, constraint: str) -> Certificate:
    """A certificate that becomes valid in 2099: what one of today is on a host whose clock is behind."""
    made, configuration = Certificate(folder / "future.pem", folder / "future.key"), folder / "configuration"
    configuration.write_text(OF_THE_FUTURE.format(folder=folder, constraint=constraint))
    (folder / "index").touch()
    where = ["-config", str(configuration)]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(made.key)]
    run("req", "-new", *where, *key, "-out", str(folder / "request"))
    dates = ["-startdate", "20990101000000Z", "-enddate", "21000101000000Z"]
    request = ["-keyfile", str(made.key), "-in", str(folder / "request"), "-out", str(made.chain)]
    run("ca", "-batch", "-selfsign", "-notext", *where, *request, *dates)
    return made


def signed(folder: Path, name: str, by: Certificate | None) -> Certificate:
    """A certificate, or an authority that nobody vouches for."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    request = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(made.key)]
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    if by is None:
        run("req", "-x509", *request, "-subj", f"/CN={name}", "-out", str(made.chain))
        return made
    run("req", *request, *subject, "-out", str(folder / "request"))
    vouched = ["-CA", str(by.chain), "-CAkey", str(by.key), "-CAcreateserial", "-copy_extensions", "copyall"]
    run("x509", "-req", "-in", str(folder / "request"), *vouched, "-out", str(made.chain))
    return made


def run(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)  # noqa: S607


def test_without_openssl_the_person_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="install openssl, or give --tls-cert and --tls-key"):
        Entrance.read(":0").certificate_for(tmp_path, "node1")
    assert not list(tmp_path.iterdir())


def test_an_openssl_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "openssl").write_text("#!/bin/sh\necho no such curve >&2\nexit 1\n")
    (tmp_path / "bin" / "openssl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    with pytest.raises(JobError, match="no such curve.*give --tls-cert"):
        make_certificate(tmp_path, ["node1"])
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@with_openssl
def test_ones_own_certificate_is_shared_without_its_key(own: Certificate, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    assert Entrance.read(":0", own.chain, own.key).certificate_for(folder, "node1") == own
    assert [path.name for path in folder.iterdir()] == ["certificate.pem"]
    assert is_believed(own, certificate_file(folder))
    with pytest.raises(JobError, match=r"--tls-cert .* holds no certificate"):
        Entrance.read(":0", own.key, own.key).certificate_for(folder, "node1")


# --- who comes


def test_a_job_on_another_host_is_its_url_and_two_files(tmp_path: Path) -> None:
    token = make_token(tmp_path)
    found = Whereabouts("https://node1:1/", token_file(tmp_path), tmp_path / "c").address()
    assert (found.url, found.token, found.certificate) == ("https://node1:1", token, tmp_path / "c")
    with pytest.raises(JobError, match="--token-file is missing"):
        Whereabouts("https://node1:1").address()
    with pytest.raises(JobError, match="--token-file is missing"):  # of another job, perhaps
        Whereabouts("https://node1:1", run_dir=tmp_path).address()
    with pytest.raises(JobError, match="reached over https"):
        Whereabouts("http://node1:1", token_file(tmp_path)).address()
    with pytest.raises(JobError, match="the certificate .* cannot be used"):
        _ = found.context


@with_openssl
def test_whoever_has_the_run_folder_finds_the_certificate_in_it(own: Certificate, tmp_path: Path) -> None:
    make_token(tmp_path)
    (tmp_path / "coordinator.json").write_text('{"url": "https://node1:1", "pid": 1}')
    assert address_of(tmp_path).certificate == own.chain
    assert address_of(tmp_path, tmp_path / "c").certificate == tmp_path / "c"


def test_the_command_for_another_host_has_what_workers_need_in_common_and_no_token(tmp_path: Path) -> None:
    script = Script("train.py", ("--name", "a b"))
    launch = LaunchSettings(
        script, workers=2, options=options(shards=8, threads=2, checkpoint_every=50, policies=("noise-scale",))
    )
    settings = ElasticSettings(launch, Range(2, 8), failure_timeout_s=30, entrance=Entrance.read(":0"))
    token = make_token(tmp_path)
    told, command = invitation(settings, tmp_path, "https://node1:7")
    assert command == (
        "  unisono join https://node1:7 -n 6 --token-file token --certificate certificate.pem --shards 8 "
        "--policy noise-scale --threads 2 --checkpoint-every 50 --failure-timeout-s 30 train.py --name 'a b'"
    )
    assert str(tmp_path / "token") in told
    assert token not in told + command
    assert invitation(ElasticSettings(launch, Range(2, 8)), tmp_path, "http://127.0.0.1:7") == []


def test_hosts_of_one_name_are_two_hosts_all_the_same() -> None:
    with closing(PeerListener(1.0)) as one, closing(PeerListener(1.0)) as two:
        here = [listener.address.hex() for listener in (one, two)]
    elsewhere = bytes.fromhex(here[0])[:9] + b"f" * (len(here[0]) // 2 - 9)
    addresses = [here[0], elsewhere.hex(), here[1]]
    neighbours = tuple(Neighbour(rank=rank, worker=f"w{rank}", address=each) for rank, each in enumerate(addresses))
    new = NewGeneration(generation=1, ranks=(Ranks(workers=3, shards=1),), here=neighbours, source=0)
    found = [ElasticRendezvous(new, rank, "box", one, HashStore(), 1.0).environment for rank in range(3)]
    assert [(each.local_rank, each.local_world_size) for each in found] == [(0, 2), (0, 1), (1, 2)]


# --- how a coordinator ends


class EndsNow(reception.WebSocketProtocol):
    """Its server ends as soon as the other side hangs up, before the connection is gone."""

    ended = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            self.shutdown()
            self.ended = True


async def hung_up(app: Any) -> bool:
    """Whether a connection was ended so."""
    loop, config = asyncio.get_running_loop(), Config(app, ws_ping_interval=None, log_config=None)
    config.load()
    protocol = EndsNow(config, ServerState(), {}, stuck_s=1.0)
    served = await loop.create_server(lambda: protocol, "127.0.0.1", 0)
    async with served, connect(f"ws://127.0.0.1:{served.sockets[0].getsockname()[1]}"):
        pass
    return protocol.ended


def test_a_coordinator_ends_well_while_a_worker_is_hanging_up() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()

    assert asyncio.run(hung_up(app))
