"""Ends the ranks that a dead one leaves behind, and names it.

A rank that dies leaves its peers in a collective, for as long as the collective's time-out. Here each rank holds a
connection to rank 0: the kernel closes it when the process dies, and a beat that stays away tells of a dead host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time

import torch.distributed as dist

from hybrid.agreement import from_rank_zero

logger = logging.getLogger(__name__)

BEAT = 5.0
"""Seconds between the signs of life."""

SILENCE = 60.0
"""Seconds without one after which a rank counts as dead."""

GRACE = 10.0
"""Seconds in which a survivor may end by itself, with the error it gets from the lost connection."""

EXIT_RANK_DIED = 70
"""Exit code of the survivors: EX_SOFTWARE of sysexits.h."""

_BYE = "bye"


class Watchdog:
    """Watches the other ranks from a thread. Make it on rank 0 first, and tell the others its `port`.

    Args:
        host: of rank 0.
        port: what rank 0 listens on; 0 on rank 0 itself.
        beat, silence, grace: as the constants of these names.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str,
        port: int = 0,
        *,
        beat: float = BEAT,
        silence: float = SILENCE,
        grace: float = GRACE,
    ) -> None:
        self.dead: str | None = None
        """What happened, once a rank has died."""
        self._rank, self._world_size = rank, world_size
        self._beat, self._silence, self._grace = beat, silence, grace
        self._peers: dict[socket.socket, int | None] = {}
        self._heard: dict[socket.socket, float] = {}
        self._lines: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._closing = False
        self._listener: socket.socket | None = None
        if rank == 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._listener = socket.create_server(
                ("", port), family=family, dualstack_ipv6=dual, backlog=max(1, world_size)
            )
            self._selector.register(self._listener, selectors.EVENT_READ)
            self.port: int = self._listener.getsockname()[1]
        else:
            self.port = port
            connection = socket.create_connection((host, port), timeout=silence)
            connection.sendall(f"{rank}\n".encode())
            self._add(connection, 0)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _add(self, connection: socket.socket, rank: int | None) -> None:
        connection.settimeout(self._beat)
        self._peers[connection], self._heard[connection], self._lines[connection] = rank, time.monotonic(), b""
        self._selector.register(connection, selectors.EVENT_READ)

    def verdict(self, seconds: float) -> str | None:
        """Who has died, waiting so long for the news; None if nobody has."""
        deadline = time.monotonic() + seconds
        while self.dead is None and time.monotonic() < deadline:
            time.sleep(seconds / 100)
        return self.dead

    def close(self) -> None:
        """Take leave: this rank ends because it is done."""
        with self._lock:
            self._closing = True
            for connection in self._peers:
                with contextlib.suppress(OSError):
                    connection.sendall(f"{_BYE}\n".encode())

    def _watch(self) -> None:
        last_beat = 0.0
        while not self._closing and self.dead is None:
            if time.monotonic() - last_beat > self._beat:
                self._tell("beat")
                last_beat = time.monotonic()
            for key, _ in self._selector.select(timeout=self._beat / 5):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    self._add(self._listener.accept()[0], None)
                else:
                    self._receive(key.fileobj)
            self._look_for_silence()
        if self.dead is not None and not self._closing:
            self._end()

    def _tell(self, line: str) -> None:
        with self._lock:
            for connection in self._peers:
                with contextlib.suppress(OSError):  # it shows when reading
                    connection.sendall(f"{line}\n".encode())

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._lost(connection, "its process has died")
            return
        self._heard[connection] = time.monotonic()
        *lines, self._lines[connection] = (self._lines[connection] + data).split(b"\n")
        for line in (line.decode(errors="replace") for line in lines):
            if line == _BYE:
                self._forget(connection)
                return
            if line.startswith("dead "):
                self.dead = line.removeprefix("dead ")
            elif self._peers[connection] is None:
                if not line.isdigit():  # not one of us
                    self._forget(connection)
                    return
                self._peers[connection] = int(line)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for connection, heard in list(self._heard.items()):
            if now - heard > self._silence:
                self._lost(connection, f"nothing was heard of it for {self._silence:.0f} s")

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._selector.unregister(connection)
            del self._peers[connection], self._heard[connection], self._lines[connection]
            connection.close()

    def _lost(self, connection: socket.socket, why: str) -> None:
        rank = self._peers[connection]
        self._forget(connection)
        if rank is None or self.dead is not None or self._closing:
            return
        self.dead = f"rank {rank} is gone: {why}"
        self._tell(f"dead {self.dead}")

    def _end(self) -> None:
        print(f"rank {self._rank}: {self.dead}; this rank ends as well", file=sys.stderr, flush=True)
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and not self._closing:
            time.sleep(self._grace / 100)
        if not self._closing:
            os._exit(EXIT_RANK_DIED)


def start_watchdog() -> Watchdog | None:
    """The watchdog of this rank of the running world, or None where there is nobody to watch; a collective call."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return None
    host = os.environ["MASTER_ADDR"]
    leader = Watchdog(rank, world_size, host) if rank == 0 else None
    port = from_rank_zero(leader.port if leader is not None else 0)
    if leader is not None:
        return leader
    try:
        return Watchdog(rank, world_size, host, port)
    except OSError as error:
        logger.warning("rank %d watches nobody: %s:%d cannot be reached (%s)", rank, host, port, error)
        return None
