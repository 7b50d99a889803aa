"""Two hosts on one machine: network namespaces joined by a veth pair, each with a host name and process numbers of its own.

Processes of one see of the other only what comes through the link, which can be cut, mended and slowed. They share the file system.
Needs root and Linux's ip, tc and unshare.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launching import popen

# The process that makes them is part of the names, so that those of a killed one can be told, and removed.
NAME = re.compile(r"trainer-(\d+)-[ab]")
NET = "10.207.{}.{}"


def missing_tools() -> str | None:
    """Why two hosts cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "two hosts are network namespaces, which only root can make"
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"two hosts need the command {missing[0]}"
    try:
        name = f"trainer-{os.getpid()}-a"
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"two hosts cannot be made: {error.stderr.strip()}"
    return None


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        name: of the host, which both resolve.
        address: of its end of the link.
        interface: the same, as `ip addr` names it.
        namespace: as `ip netns` names it.
        folder: for what it keeps of its own, its /etc/hosts.
    """

    name: str
    address: str
    interface: str
    namespace: str
    folder: Path

    def command(self, *words: str | Path) -> list[str]:
        """What runs `words` here, and ends with all that they have started when its own process ends."""
        # Without a name server: its silence would cost seconds for each address that is looked up.
        binds = " && ".join(f"mount --bind {self.folder}/{file}.{self.name} /etc/{file}" for file in ("hosts", "resolv.conf"))
        inside = f'{binds} && hostname {self.name} || exit 99; "$@"; exit $?'
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "sh", "-c", inside, "sh"]
        return ["ip", "netns", "exec", self.namespace, *apart, *map(str, words)]

    def popen(self, *words: str | Path, cwd: Path, variables: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        return popen(*self.command(*words), cwd=cwd, variables=variables)


@dataclass(frozen=True)
class Hosts:
    """The two, and the link between them."""

    a: Host
    b: Host

    def __iter__(self) -> Iterator[Host]:
        return iter((self.a, self.b))

    def cut(self) -> None:
        """From now on nothing arrives, as when a cable is pulled: neither side is told."""
        for host in self:
            _ip("netns", "exec", host.namespace, "ip", "link", "set", host.interface, "down")

    def mend(self) -> None:
        for host in self:
            _ip("netns", "exec", host.namespace, "ip", "link", "set", host.interface, "up")

    def slow(self, rate: str | None = None) -> None:
        """Let the link carry `rate` each way, in tc's words ("100mbit"), by a token bucket; None: all that it can."""
        for host in self:
            tc = ["netns", "exec", host.namespace, "tc", "qdisc"]
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*tc, "del", "dev", host.interface, "root")
            if rate is not None:
                _ip(*tc, "add", "dev", host.interface, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make the two, and remove them with all that still runs in them; `folder` holds their files."""
    remove_leftovers()
    me = os.getpid()
    # Other test processes of this machine have theirs: another net for each.
    net = me % 254 + 1
    a, b = (
        Host(name, NET.format(net, number), f"veth-{name}", f"trainer-{me}-{letter}", folder)
        for number, (letter, name) in enumerate((("a", "first"), ("b", "second")), start=1)
    )
    hosts = Hosts(a, b)
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", a.interface, "netns", a.namespace, "type", "veth", "peer", "name", b.interface, "netns", b.namespace)
        for host in hosts:
            inside = ("netns", "exec", host.namespace, "ip")
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip(*inside, "link", "set", "lo", "up")
            lines = ["127.0.0.1 localhost", *(f"{other.address} {other.name}" for other in hosts)]
            (folder / f"hosts.{host.name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
            (folder / f"resolv.conf.{host.name}").touch()
        hosts.mend()
        yield hosts
    finally:
        for host in hosts:
            _remove(host.namespace)


def remove_leftovers() -> None:
    """Remove the hosts of test processes that were killed."""
    for line in _ip("netns", "list").splitlines():
        match = NAME.fullmatch(line.split()[0])
        if match is not None and not psutil.pid_exists(int(match[1])):
            _remove(match[0])


def _remove(namespace: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in _ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", namespace)


def wait_for_ends(*children: "subprocess.Popen[str]", seconds: float) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each; all must end within `seconds`."""
    deadline = time.monotonic() + seconds
    ends = []
    try:
        for child in children:
            out, errors = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ends.append((child.returncode, out, errors))
    finally:
        for child in children:
            child.kill()
    return ends
