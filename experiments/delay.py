"""Delays the frames that hosts send, where the kernel has no ``netem``.

A port with a delay is not on the switch itself. This process takes each frame that the host sends
from the port, holds it for the delay, and hands it to a tap device, which is on the switch in the
port's place; frames to the host go from the tap device to the port in the kernel. Whole segments
of up to 64 KiB are held, which costs a few hundredths of a core at 1 Gbit/s.

Run by :mod:`experiments.namespaces` as ``python delay.py PORT:TAP:SECONDS ...`` in the namespace of
the switch; it ends when its standard input does.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from contextlib import suppress

# Of linux/if_tun.h: a device for frames without a header but that of offloads.
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, and TCP segments of IPv4 and IPv6
# Of linux/if_packet.h and socket.h.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_RCVBUFFORCE, _ETH_P_ALL, _PR_SET_TIMERSLACK = 33, 3, 29
_LONGEST = 65536 + 64

Held = collections.deque[tuple[float, bytes]]


def _opened(tap: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", tap.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
    return device


def _source(port: str) -> socket.socket:
    source = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    source.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    source.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    with suppress(PermissionError):  # in a user namespace: the kernel's limit holds
        source.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 256 << 20)
    source.bind((port, _ETH_P_ALL))
    source.setblocking(False)
    return source


def main(lines: list[str]) -> None:
    """Relays frames until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # wake up to a nanosecond late
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    relays: dict[socket.socket, tuple[int, float, Held]] = {}
    for line in lines:
        port, tap, seconds = line.split(":")
        device = _opened(tap)
        relays[_source(port)] = device, float(seconds), collections.deque()
    print("ready", flush=True)
    while True:
        wait = _sent(relays)
        for source in select.select([*relays, sys.stdin], (), (), wait)[0]:
            if source is sys.stdin:
                return
            _, seconds, held = relays[source]
            due = time.monotonic() + seconds
            with suppress(OSError):  # drained, or the port went down
                while True:
                    held.append((due, source.recv(_LONGEST)))


def _sent(relays: dict[socket.socket, tuple[int, float, Held]]) -> float | None:
    """Sends the frames that are due; returns the seconds until the next one is."""
    now, waits = time.monotonic(), []
    for device, _, held in relays.values():
        while held and held[0][0] <= now:
            with suppress(OSError):  # the port is down: the frame is lost
                os.write(device, held.popleft()[1])
        if held:
            waits.append(held[0][0] - now)
    return min(waits, default=None)


if __name__ == "__main__":
    main(sys.argv[1:])
