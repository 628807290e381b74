"""A TCP proxy before a server that is slow, falls silent, forgets connections or changes bytes, when told to."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise


class Proxy:
    """What lies between a client and the server on a port of 127.0.0.1.

    delay_s: that bytes from the client take. is_silent: nothing goes through, and nobody is told. flip: the place of
    the byte, among those of the server's next answers, of which one bit is turned; None for none. ways: the way of
    every piece that went through, ">" to the server and "<" back.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.delay_s = 0.0
        self.is_silent = False
        self.flip: int | None = None
        self.flipped = 0
        self.ways: list[str] = []
        self._lost: set[int] = set()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def before(self, url: str) -> str:
        """The URL of a database of the server, by way of this proxy."""
        return re.sub(r":\d+/", f":{self.port}/", url)

    @property
    def round_trips(self) -> int:
        """How often the client waited for an answer."""
        ways = list(self.ways)
        return sum(pair == (">", "<") for pair in pairwise(ways))

    def forget(self) -> None:
        """Lose what goes over the connections there are now, for ever; new ones work."""
        self._lost.update(connection.fileno() for connection in self._open)

    def close(self) -> None:
        """End it and its connections."""
        for connection in (self._listening, *self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open += [client, server]
                for source, target, way in ((client, server, ">"), (server, client, "<")):
                    threading.Thread(target=self._pass, args=(source, target, way), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        number = source.fileno()
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.is_silent or number in self._lost:
                    continue
                if way == ">":
                    time.sleep(self.delay_s)
                self.ways.append(way)
                target.sendall(self._changed(data) if way == "<" else data)
        if not self.is_silent and number not in self._lost:
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

    def _changed(self, data: bytes) -> bytes:
        place, self.flip = self.flip, None if self.flip is None else self.flip - len(data)
        if place is None or place >= len(data):
            return data
        self.flip, self.flipped = None, self.flipped + 1
        return data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]


@contextmanager
def before(port: int) -> Iterator[Proxy]:
    """A proxy while it lasts."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
