"""A run over two hosts: network namespaces joined by a cable that can be cut, with an agent of torchrun on each."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ..warm import Running, Warm
from .conftest import free_port, until

HERE = Path(__file__).parent
IP = shutil.which("ip")
Ends = list[tuple[dict[str, Any], Any]]  # of each rank: what it told, and its weights


def ip(*words: str) -> None:
    assert IP is not None
    subprocess.run([IP, *words], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """Two hosts, and what they write."""

    warm: Warm
    folder: Path
    names: tuple[str, str]  # of network namespaces; "" where there are none, and both are on the loopback device
    addresses: tuple[str, str]
    why: str = ""  # there are none

    def begin(self, name: str, *arguments: str) -> list[Running]:
        """Start the agents of a run of `resuming.py`."""
        master = f"{self.addresses[0]}:{free_port()}"
        environment = {**os.environ, "HOTLOOP_DEVICE": "cpu", "HOTLOOP_RANK_TIMEOUT": "3"}
        command = [master, str(HERE / "resuming.py"), str(self.folder), name, *arguments]
        return [
            self.warm.start(
                HERE / "agent.py",
                *(host, address, *command),
                cwd=self.folder,
                environment=environment,
                out=self.folder / f"{name} out {number}",
                err=self.folder / f"{name} err {number}",
            )
            for number, (host, address) in enumerate(zip(self.names, self.addresses, strict=True))
        ]

    def told(self, name: str) -> str:
        """What both hosts have printed."""
        return "\n".join((self.folder / f"{name} err {number}").read_text(encoding="utf-8") for number in (0, 1))

    def link(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", "cable", state)

    def ends(self, name: str) -> Ends:
        """What each rank told at the end of a run, and its weights."""
        ends = [self.folder / f"end {name} 2 {rank}.json" for rank in (0, 1)]
        return [(json.loads(end.read_text()), torch.load(end.with_suffix(".pt"))) for end in ends]


@pytest.fixture(scope="module")
def hosts(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    loopback = (warm, folder, ("", ""), ("127.0.0.2", "127.0.0.3"))
    if IP is None:
        yield Hosts(*loopback, "needs `ip` (Debian's iproute2)")
        return
    names = tuple(f"hl{os.getpid()}{each}" for each in "ab")
    net = f"10.{os.getpid() % 250}.77"
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for number, name in enumerate(names, start=1):
                ip("-n", name, "addr", "add", f"{net}.{number}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            yield Hosts(*loopback, f"needs rights to make network namespaces: {error.stderr.strip()}")
        else:
            yield Hosts(warm, folder, (names[0], names[1]), (f"{net}.1", f"{net}.2"))
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


@pytest.fixture(scope="module")
def undisturbed(hosts: Hosts) -> Ends:
    codes = [agent.wait() for agent in hosts.begin("whole")]

    assert codes == [0, 0], hosts.told("whole")
    return hosts.ends("whole")


def assert_resumed(ends: Ends, undisturbed: Ends) -> None:
    for (told, weights), (_, expected) in zip(ends, undisturbed, strict=True):
        assert told["resumed"] == 1
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_a_run_over_two_hosts(hosts: Hosts, undisturbed: Ends) -> None:
    names = [told["host"] for told, _ in undisturbed]
    assert hosts.why or names in ([*hosts.names], [*reversed(hosts.names)])
    assert [told["resumed"] for told, _ in undisturbed] == [0, 0]


def test_a_rank_that_is_killed(hosts: Hosts, undisturbed: Ends) -> None:
    codes = [agent.wait() for agent in hosts.begin("killed", "1", "10")]

    assert codes == [0, 0], hosts.told("killed")
    assert_resumed(hosts.ends("killed"), undisturbed)


def test_a_link_that_is_cut_for_a_while(hosts: Hosts, undisturbed: Ends) -> None:
    if hosts.why:
        pytest.skip(hosts.why)
    agents = hosts.begin("cut slowly")
    until(lambda: any(hosts.folder.glob("saved cut slowly/step-*")))
    hosts.link("down")
    until(lambda: "RankLost" in hosts.told("cut slowly"))
    hosts.link("up")
    codes = [agent.wait() for agent in agents]

    assert codes == [0, 0], hosts.told("cut slowly")
    assert_resumed(hosts.ends("cut slowly"), undisturbed)
