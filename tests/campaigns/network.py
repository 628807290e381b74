"""Hosts of a network on one machine: network namespaces, joined by a relay of IP packets that can cut, delay and lose.

Each host has a TUN device, so that its TCP is the kernel's; the relay is a thread here. Needs root and iproute2.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "10.213.7"
"""First bytes of all addresses."""
_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST = 1 << 16


def usable() -> bool:
    """Return whether this machine can have such a network."""
    return os.getuid() == 0 and shutil.which("ip") is not None and _TUN.exists()


class Network:
    """Hosts by name. Links may be changed while it runs.

    cut: hosts whose link is down. delay_s: of a packet, one way. loss: share of packets that are lost.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.cut: frozenset[str] = frozenset()
        self.delay_s, self.loss = 0.0, 0.0
        self._hosts, self._drawn = list(hosts), random.Random(0)
        self._devices = [self._host(place, name) for place, name in enumerate(hosts)]
        self._ended = threading.Event()
        self._relay = threading.Thread(target=self._carry, daemon=True)
        self._relay.start()

    def address(self, host: str) -> str:
        """IP address of a host."""
        return f"{PREFIX}.{1 + self._hosts.index(host)}"

    def inside(self, host: str) -> list[str]:
        """Words before a command that is to run on a host."""
        return ["ip", "netns", "exec", _namespace(host)]

    def close(self) -> None:
        """Remove all hosts; what runs on them must have ended."""
        self._ended.set()
        self._relay.join()
        for device in self._devices:
            os.close(device)
        for host in self._hosts:
            _ip("netns", "del", _namespace(host))

    def _host(self, place: int, name: str) -> int:
        """Make a host; returns the file of its device."""
        space, label = _namespace(name), f"dse{place}"
        with suppress(subprocess.CalledProcessError):  # left by a run that was killed
            _ip("netns", "del", space)
        _ip("netns", "add", space)
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", label.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("link", "set", label, "netns", space)
        _ip("-n", space, "addr", "add", f"{PREFIX}.{1 + place}/24", "dev", label)
        _ip("-n", space, "link", "set", label, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        return device

    def _carry(self) -> None:
        """Take packets from one device to another, until the end."""
        waiting: list[tuple[float, int, int, bytes]] = []
        number = itertools.count()
        places = {device: place for place, device in enumerate(self._devices)}
        while not self._ended.is_set():
            pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            ready, _, _ = select.select(self._devices, [], [], min(0.1, pause_s))
            for device in ready:
                packet = os.read(device, _LARGEST)
                target = packet[19] - 1  # last byte of the address in a header of IP version 4
                if packet[0] >> 4 != 4 or not 0 <= target < len(self._devices):
                    continue
                ends = {self._hosts[places[device]], self._hosts[target]}
                if not ends & self.cut and self._drawn.random() >= self.loss:
                    due = time.monotonic() + self.delay_s
                    heapq.heappush(waiting, (due, next(number), self._devices[target], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                with suppress(BlockingIOError):  # a full device loses packets, as any does
                    os.write(waiting[0][2], waiting[0][3])
                heapq.heappop(waiting)


def _namespace(host: str) -> str:
    return f"dse-{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def joined(hosts: Sequence[str]) -> Iterator[Network]:
    """A network while it lasts."""
    network = Network(hosts)
    try:
        yield network
    finally:
        network.close()
