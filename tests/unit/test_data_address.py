"""At which address a host's workers are called by those of others."""

import socket
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist

from rpc_endpoints import OVER_IPV6
from unisono.errors import LaunchError
from unisono.membership.probe import data_address
from unisono.membership.rendezvous import Generation, form_group, own_address
from unisono.plan.split import Split
from unisono.reduce.admission import is_host

pytestmark = pytest.mark.unit

Known = namedtuple("Known", "family address")


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two: one speaks IPv6 alone, the other both."""
    local, six = Known(socket.AF_INET6, "fe80::1%a"), Known(socket.AF_INET6, "fd00::5")
    known = {"six": [local, six], "both": [six, Known(socket.AF_INET, "10.0.0.5")], "local": [local]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)


@pytest.mark.parametrize(("interface", "expected"), [("six", "fd00::5"), ("both", "10.0.0.5"), ("none", "fd00::7")])
def test_an_interface_without_ipv4_is_called_by_ipv6(
    interface: str, expected: str, interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert data_address("fd00::1", "fd00::7") == expected


@pytest.mark.parametrize("found", ["fe80::7%a", "fe80::7"])
def test_an_address_that_only_this_host_understands_is_refused(
    found: str, interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "local")
    with pytest.raises(LaunchError, match=f"reached at {found}, which other hosts cannot call"):
        data_address("fe80::1", found)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("10.0.0.5", True), ("fd00::5", True), ("fe80::1%a", False), ("a.example", False), ("", False)],
)
def test_addresses_of_hosts_are_numbers_of_either_kind(host: str, expected: bool) -> None:
    assert is_host(host) is expected


class Seen(dist.HashStore):
    """A store whose server sees this host at an address."""

    interface = "::1"


@OVER_IPV6
def test_a_process_group_meets_over_ipv6() -> None:
    store = Seen()
    assert own_address(store) == "::1"

    def meet(rank: int) -> list[float]:
        group = form_group(store, Generation(1, rank, Split.even(2, 2)), "gloo", 20.0)
        total = torch.tensor([float(rank + 1)])
        group.allreduce([total]).wait()
        return list(total.tolist())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(meet, range(2))) == [[3.0], [3.0]]
