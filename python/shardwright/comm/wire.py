"""The wire between hosts: moves bytes between their carriers through our own Gloo group, which never adds."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..layout.memory import bytes_of

#: longer than any of our deadlines; the ranks that wait for the carrier keep those
_FOR_EVER = timedelta(days=1000)
#: the wire's own tags, among those of SW_MESSAGE_LAST (csrc/comm/bridge.h)
_FAREWELL, _NEVER_SENT, _TOKEN = (6 << 28) + 1, (6 << 28) + 2, (6 << 28) + 3
_FAREWELL_S = 0.2
#: seconds that a carrier waits for the tokens of its partners in the exchange of frames
_TOKENS_S = 30.0
#: the most hosts for which all connections are made at the start; with more, each is made at first use
EAGER_HOSTS = 32
#: radix of csrc/comm/host_map.h
_RADIX = 8


class Wire:
    """The wire between the carriers of hosts, over a Gloo group of our own; implements csrc/comm/bridge.h.

    The first message each way is a token, HMAC-SHA256 of both ranks under the group's secret, before which none of a peer is
    accepted. A forked child closes the sockets that `before` lacks: they would outlive a killed process.
    """

    #: rate below which carriers send packets (docs/design/hosts.md); the engine reads it once
    slow_bytes_per_s = 300_000_000

    def __init__(
        self,
        gloo: Any,
        carriers: Sequence[int],
        secret: bytes,
        before: set[tuple[int, str]],
        exits: Callable[[], bool] = lambda: False,
    ) -> None:
        self._group = gloo  # its timeout bounds the rendezvous; see _FOR_EVER
        self._place = {rank: place for place, rank in enumerate(carriers)}
        self._secret = secret
        self._rank = carriers[gloo.rank()]
        self._exits = exits
        #: by rank: the receive of its token, the token's memory, the send of ours
        self._tokens: dict[int, tuple[Any, torch.Tensor, Any]] = {}
        self._unproven = set(carriers) - {self._rank}
        self._exchange_tokens([carriers[place] for place in first_peers(gloo.rank(), len(carriers))])
        self._sockets = sockets() - before
        _wires.add(self)

    def send(self, rank: int, tag: int, address: int, nbytes: int) -> Any:
        """Begin a transfer and return the work to wait for."""
        if rank in self._unproven:
            self._introduce(rank)
        return self._group.send([_bytes_at(address, nbytes)], self._place[rank], tag)

    def receive(self, rank: int, tag: int, address: int, nbytes: int) -> Any:
        if rank in self._unproven:
            self._introduce(rank)
            return self._group.recv([_bytes_at(address, nbytes)], self._place[rank], tag), rank
        return self._group.recv([_bytes_at(address, nbytes)], self._place[rank], tag)

    def wait(self, work: Any, timeout_s: float | None = None) -> None:
        """Wait for a transfer. After `timeout_s` close all connections and raise RuntimeError."""
        timeout = _FOR_EVER if timeout_s is None else timedelta(seconds=timeout_s)
        if isinstance(work, tuple):
            work, rank = work
            self._believe(rank, timeout)
        work.wait(timeout)

    def end_silence_after(self, silent_s: float | None) -> None:
        """Let the kernel close connections whose bytes no peer's kernel acknowledges for `silent_s`; None: its own rule."""
        for fd, _ in self._sockets & sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * (silent_s or 0)))

    def _exchange_tokens(self, ranks: Sequence[int]) -> None:
        deadline_s = time.monotonic() + _TOKENS_S
        for rank in ranks:
            self._introduce(rank)
        for rank in ranks:
            self._believe(rank, timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))

    def _introduce(self, rank: int) -> None:
        """Start to send this rank's token and to receive the peer's; once for each peer."""
        if rank in self._tokens:
            return
        token = torch.frombuffer(bytearray(self._token(self._rank, rank)), dtype=torch.uint8)
        received = torch.zeros_like(token)
        sending = self._group.send([token], self._place[rank], _TOKEN)
        self._tokens[rank] = self._group.recv([received], self._place[rank], _TOKEN), received, sending

    def _believe(self, rank: int, timeout: timedelta) -> None:
        """Return once `rank` has proved that it knows the secret."""
        if rank not in self._unproven:
            return
        receiving, received, sending = self._tokens[rank]
        receiving.wait(timeout)
        if not hmac.compare_digest(bytes_of(received), self._token(rank, self._rank)):
            raise RuntimeError(f"the process that answers for rank {rank} does not know the secret of this group")
        sending.wait(timeout)
        self._unproven.discard(rank)
        del self._tokens[rank]

    def _token(self, sender: int, receiver: int) -> bytes:
        return hmac.digest(self._secret, f"wire {sender} {receiver}".encode(), hashlib.sha256)

    def close(self, gently: bool) -> bool:
        """Close all connections, with `gently` after the peers' farewell; at exit return False, since the kernel does.

        Gloo has no call for it, but a receive that times out closes all connections of its group.
        """
        if self._exits():
            return False
        met = [
            rank for rank in self._place if rank != self._rank and (rank not in self._unproven or rank in self._tokens)
        ]
        others = [self._place[rank] for rank in met]
        if gently:
            self._exchange_farewells(others)
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        for other in others:
            try:
                receiving = self._group.recv([nothing], other, _NEVER_SENT)
            except RuntimeError:  # the connection is closed already
                continue
            with contextlib.suppress(RuntimeError):
                receiving.wait(timedelta(milliseconds=1))
        return True

    def let_go(self) -> None:
        """Close the sockets in a forked child, and keep their numbers, under which Gloo would close other files."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, _ in self._sockets & sockets():
            os.dup2(nothing, fd)
        os.close(nothing)

    def _exchange_farewells(self, others: Sequence[int]) -> None:
        """Wait for the farewells of `others`, which show that earlier messages arrived. A rank that sends none is busy."""
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        received = [torch.zeros_like(word) for _ in others]
        deadline_s = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(RuntimeError):  # the end of the connection counts as a farewell
            sending = [self._group.send([word], other, _FAREWELL) for other in others]
            receiving = [self._group.recv([each], other, _FAREWELL) for each, other in zip(received, others)]
            for work in (*receiving, *sending):
                work.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))


def first_peers(place: int, count: int) -> list[int]:
    """Return the carriers to which this one connects at the start: all, or its partners in the exchange of frames."""
    if count <= EAGER_HOSTS:
        return [other for other in range(count) if other != place]
    steps, step = [], 1
    while step < count:
        steps += [far for far in range(step, step * _RADIX, step) if far < count]
        step *= _RADIX
    return sorted({(place + far * way) % count for far in steps for way in (1, -1)})


def let_go() -> None:
    """Close the sockets of all wires, in a forked child."""
    for wire in _wires:
        wire.let_go()


#: open wires
_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def sockets() -> set[tuple[int, str]]:
    """Return the sockets of this process: file descriptors and the kernel's names."""
    found = set()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # the listed folder's own descriptor is closed again
            found.add((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    return {(fd, name) for fd, name in found if name.startswith("socket:")}


#: one type for any length: ctypes needs 80 to 170 us, with the GIL, to make a type for each
_Bytes = ctypes.c_uint8 * (1 << 46)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(_Bytes.from_address(address), dtype=torch.uint8, count=nbytes)
