"""Addresses of replicas, and names that mean several hosts."""

from __future__ import annotations

import asyncio
import socket

import pytest

from slotwise.fleet.replicas import Addresses, checked, resolved


class Recorded:
    """In place of replicas: what comes and goes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.left: list[str] = []
        self.draining: list[str] = []
        self.may_go = asyncio.Event()

    def add(self, name: str, url: str) -> None:
        assert url == f"http://{name}" and not self.has(name)
        self.names.append(name)

    def has(self, name: str) -> bool:
        return name in (*self.names, *self.draining)

    async def leave(self, name: str, timeout: float) -> None:
        self.names.remove(name)
        self.draining.append(name)
        await self.may_go.wait()
        self.draining.remove(name)
        self.left.append(name)


@pytest.mark.parametrize("url", ["", "x", "https://x", "http://", "http://x/v1", "http://u:p@x", "http://x?y=1"])
def test_an_address_without_a_replica_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be an address"):
        checked(url)


def test_a_slash_at_the_end_is_left_out() -> None:
    assert checked("http://127.0.0.1:8001/") == "http://127.0.0.1:8001"


def test_an_unknown_name_means_no_host_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert asyncio.run(resolved("http://replicas:8000")) == []


def test_replicas_come_and_go_with_the_hosts_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3", "fd00::1"], []]
    monkeypatch.setattr("slotwise.fleet.replicas.EVERY", 0.0)

    def known(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
        found = hosts[0] if len(hosts) == 1 else hosts.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    replicas = Recorded()
    replicas.may_go.set()

    async def follow() -> None:
        following = Addresses(["http://replicas:8000"], replicas)  # type: ignore[arg-type]
        following.begin()
        while hosts != [[]]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        following.end()

    asyncio.run(follow())
    assert replicas.names == ["10.0.0.2:8000", "10.0.0.3:8000", "[fd00::1]:8000"]  # and no host at all changes nothing
    assert replicas.left == ["10.0.0.1:8000"]


def test_an_address_that_comes_back_while_its_replica_drains_is_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that cannot be resolved for a while keeps its hosts, also if other names can be resolved."""
    monkeypatch.setattr("slotwise.fleet.replicas.EVERY", 0.0)
    hosts = {"a": ["10.0.0.1", "10.0.0.2"], "b": ["10.0.1.1"]}

    def known(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
        if not hosts[host]:
            raise socket.gaierror("not now")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts[host]]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    replicas = Recorded()

    async def until(*names: str) -> None:
        async with asyncio.timeout(60):
            while set(replicas.names) != {f"{name}:80" for name in names}:
                await asyncio.sleep(0.01)

    async def follow() -> None:
        following = Addresses(["http://a", "http://b"], replicas)  # type: ignore[arg-type]
        following.begin()
        await until("10.0.0.1", "10.0.0.2", "10.0.1.1")
        hosts.update(a=["10.0.0.1"], b=[])
        await until("10.0.0.1", "10.0.1.1")
        hosts.update(a=["10.0.0.1", "10.0.0.2"])
        await asyncio.sleep(0.1)
        assert replicas.draining == ["10.0.0.2:80"]
        replicas.may_go.set()
        await until("10.0.0.1", "10.0.0.2", "10.0.1.1")
        following.end()

    asyncio.run(follow())
    assert replicas.left == ["10.0.0.2:80"]
