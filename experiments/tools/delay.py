"""Delays the frames that hosts send, and loses some, where the kernel has no ``netem``.

A port with a delay is not on the switch itself. This process takes each frame that the host sends
from the port, holds it for the delay, and hands it to a tap device, which is on the switch in the
port's place; frames to the host go from the tap device to the port in the kernel. Whole segments
of up to 64 KiB are held, which costs a few hundredths of a core at 1 Gbit/s.

A share of the packets can get lost, each by itself as on a line: a segment that would have become
45 packets on the cable loses one of them, and continues as the segments before and after it.

Run by :mod:`experiments.tools.namespaces` as ``python delay.py PORT:TAP:SECONDS:LOSS ...`` in the
namespace of the switch; it ends when its standard input does.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import itertools
import os
import random
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
# Of linux/virtio_net.h: a segment that is cut into packets where it leaves the machine.
_GSO_TCPV4, _OFFLOADS_NBYTES, _ETHERNET_NBYTES = 1, 10, 14

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


def without_lost(frame: bytes, loss: float, draw: random.Random) -> list[bytes]:
    """Returns the rest of a frame whose packets are lost with a probability.

    Args:
        frame: with a header of offloads (``struct virtio_net_hdr``) before it.
        loss: probability of each packet.
        draw: random numbers.
    """
    _, kind, header, mss, _, _ = struct.unpack_from("=BBHHHH", frame)
    is_segment = kind & 0x7F == _GSO_TCPV4 and mss > 0
    payload = len(frame) - _OFFLOADS_NBYTES - header
    packets = -(-payload // mss) if is_segment else 1
    # Usually nothing is lost: one draw for the whole frame, then one for each packet.
    if draw.random() >= 1 - (1 - loss) ** packets:
        return [frame]
    lost = [index for index in range(packets) if draw.random() < loss]
    lost = lost or [draw.randrange(packets)]
    if not is_segment:
        return []
    edges = [-1, *lost, packets]
    runs = [(before + 1, after) for before, after in itertools.pairwise(edges)]
    return [
        _part(frame, begin * mss, min(end * mss, payload)) for begin, end in runs if end > begin
    ]


def _part(frame: bytes, begin: int, end: int) -> bytes:
    """Returns a frame with a part of the payload of a TCP segment (IPv4)."""
    flags, kind, header, mss, start, offset = struct.unpack_from("=BBHHHH", frame)
    head = bytearray(frame[_OFFLOADS_NBYTES : _OFFLOADS_NBYTES + header])
    ip, tcp, last = _ETHERNET_NBYTES, start, len(frame) - _OFFLOADS_NBYTES - header
    length = header - ip + end - begin
    struct.pack_into("!H", head, ip + 2, length)
    struct.pack_into("!H", head, ip + 10, 0)
    struct.pack_into("!H", head, ip + 10, ~_sum(head[ip:tcp]) & 0xFFFF)
    (sequence,) = struct.unpack_from("!I", head, tcp + 4)
    struct.pack_into("!I", head, tcp + 4, (sequence + begin) % 2**32)
    if end < last:
        head[tcp + 13] &= ~0x09  # FIN and PSH belong to the end
    # The checksum is left to the device: the field has the sum of the addresses and the length.
    pseudo = head[ip + 12 : ip + 20] + struct.pack("!HH", head[ip + 9], length - (tcp - ip))
    struct.pack_into("!H", head, tcp + offset, _sum(pseudo))
    if end - begin <= mss:
        kind = mss = 0
    before = struct.pack("=BBHHHH", flags, kind, header, mss, start, offset)
    payload = _OFFLOADS_NBYTES + header
    return before + bytes(head) + frame[payload + begin : payload + end]


def _sum(data: bytes | bytearray) -> int:
    """Returns the sum of words with ones' complement, as in the headers of IP."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def main(lines: list[str]) -> None:
    """Relays frames until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # wake up to a nanosecond late
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    relays: dict[socket.socket, tuple[int, float, Held]] = {}
    losses: dict[socket.socket, float] = {}
    draw = random.Random(0)
    for line in lines:
        port, tap, seconds, loss = line.split(":")
        device, source = _opened(tap), _source(port)
        relays[source] = device, float(seconds), collections.deque()
        losses[source] = float(loss)
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
                    frames = [source.recv(_LONGEST)]
                    if losses[source]:
                        frames = without_lost(frames[0], losses[source], draw)
                    held.extend((due, frame) for frame in frames)


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
