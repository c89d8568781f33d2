"""Messages: sizes known before, the same bytes in every release, and any bytes decode or raise."""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import Simulation, make
from commhooks.errors import PayloadError
from commhooks.research.wire import HEADER_BYTES, VERSION, decode, encode, message_bytes
from commhooks.schemes import (
    QSGD,
    Blockwise,
    Eden,
    MinMax,
    MinMaxPerChannel,
    SignSGD,
    TernGrad,
    TopK,
    TwoPhaseCast,
)
from commhooks.wrappers import Sealed
from ddp_core import simulate
from tests.hostile.limits import measured

CODECS = {
    "int8": Blockwise("int8", 256),
    "int8 stochastic": Blockwise("int8", 256, "stochastic"),
    "int8 dithered": Blockwise("int8", 256, "dither"),
    "int4": Blockwise("int4", 64),
    "int4 rotated": Blockwise("int4", 128, rotate=True),
    "int2": Blockwise("int2", 128),
    "e4m3": Blockwise("e4m3", 256),
    "e5m2": Blockwise("e5m2", 256),
    "mx_e4m3": Blockwise("mx_e4m3", 32),
    "sign": Blockwise("sign", 2048),
    "eden 1": Eden(1),
    "eden 3": Eden(3),
    "qsgd": QSGD(),
    "terngrad": TernGrad(),
    "min-max": MinMax(),
    "min-max, blocks": MinMaxPerChannel(128),
    "signsgd": SignSGD(),
    "bf16": TwoPhaseCast(torch.bfloat16),
    "topk": TopK(0.01),
}
# Of a message of 1000 entries: a change here is a change of the format, which needs a new VERSION.
GOLDEN = {
    "int8": "6b83167f37b0ba83",
    "int8 stochastic": "6a2b5fadbaa5e9e0",
    "int8 dithered": "2a91a8a4346e4241",
    "int4": "c3000b37b0a9cb47",
    "int4 rotated": "4af58394fc7bef28",
    "int2": "8c14b6e1a61ede09",
    "e4m3": "85735be4664a6062",
    "e5m2": "3de203a2d85008d6",
    "mx_e4m3": "00b79cce3b9c6cea",
    "sign": "a1eb1b7390cb0fae",
    "eden 1": "35140ada77aba8ad",
    "eden 3": "6ba108c8f991125c",
    "qsgd": "a511a4fa8b79c651",
    "terngrad": "dee71631f361693c",
    "min-max": "cd9c0b732ce7a8c6",
    "min-max, blocks": "fb2e2fa6fc68b0da",
    "signsgd": "dde77bad47ff50a7",
    "bf16": "8ef5d7802c0ab380",
    "topk": "52e1c572a26b3b18",
}
every_codec = pytest.mark.parametrize("name", CODECS)


def entries(n: int) -> Tensor:
    # Multiples of a power of two: no scale or sum depends on how a processor rounds.
    i = torch.arange(n, dtype=torch.int64)
    return ((i * 7919 % 255) - 127).float() / 128


@every_codec
@pytest.mark.parametrize("n", [0, 1, 31, 257, 5000])
def test_a_message_decodes_to_what_a_single_rank_would_get(name: str, n: int) -> None:
    codec, x = CODECS[name], entries(n)
    message = encode(codec, x, step=3, seed=9)
    assert message.numel() == message_bytes(codec, n)
    decoded = decode(codec, message)
    assert decoded.shape == (n,)
    assert torch.equal(decode(codec, bytes(message.tolist())), decoded)
    if n == 5000 and not name.startswith("topk"):
        assert (
            (decoded - x).norm() <= 1.1 * x.norm()
            if codec.traits.biased
            else decoded.isfinite().all()
        )


@every_codec
def test_every_changed_bit_is_found(name: str) -> None:
    codec = CODECS[name]
    message = encode(codec, entries(600))
    rng = random.Random(0)
    places = [*range(HEADER_BYTES), *rng.sample(range(HEADER_BYTES, message.numel()), 40)]
    for place in places:
        damaged = message.clone()
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(PayloadError):
            decode(codec, damaged)


@every_codec
def test_any_bytes_decode_or_raise(name: str) -> None:
    codec, rng = CODECS[name], random.Random(1)
    message = encode(codec, entries(600), checksum=False)
    for _ in range(60):
        damaged = message.clone()
        for _ in range(rng.choice([1, 20, 400])):
            damaged[rng.randrange(HEADER_BYTES, len(damaged))] = rng.randrange(256)
        with suppress(PayloadError):
            assert decode(codec, damaged).shape == (600,)
    for length in [*range(70), len(message) - 1, len(message) + 1]:
        cut = torch.cat([message, message])[:length]
        with pytest.raises(PayloadError):
            decode(codec, cut)
    with pytest.raises(PayloadError):
        decode(codec, bytes(rng.randrange(256) for _ in range(len(message))))


def test_what_is_wrong_is_said() -> None:
    int8, int4 = CODECS["int8"], CODECS["int4"]
    message = encode(int8, entries(100))
    with pytest.raises(PayloadError, match="other settings than Blockwise"):
        decode(int4, message)
    newer = message.clone()
    newer[4] = VERSION + 1
    with pytest.raises(PayloadError, match="version 5 of the format, this release reads version 4"):
        decode(int8, newer)
    with pytest.raises(PayloadError, match="not a payload: begins with"):
        decode(int8, b"x" * 100)
    with pytest.raises(PayloadError, match="a message is bytes"):
        decode(int8, torch.zeros(100))
    with pytest.raises(TypeError, match="a codec is a PackedCodec or a Codec, got PowerSGD"):
        encode(commhooks.schemes.PowerSGD(), entries(10))  # type: ignore[arg-type]


def test_the_way_it_travels_is_not_part_of_a_payload() -> None:
    message = encode(CODECS["int8"], entries(100))
    decode(replace(CODECS["int8"], pattern="all_gather"), message)


@every_codec
@pytest.mark.parametrize("n", [10**7, 10**8, 10**9, 2**63, 2**64 - 1])
def test_a_size_that_is_not_true_costs_nothing(name: str, n: int) -> None:
    message = bytearray(bytes(encode(CODECS[name], entries(15000), checksum=False).tolist()))
    message[16:24] = n.to_bytes(8, "little")

    def refuse() -> None:
        with pytest.raises(PayloadError, match="bytes follow the header"):
            decode(CODECS[name], bytes(message))

    assert measured(refuse).error() is None


@pytest.mark.parametrize("message", [None, 5, "text", [1, 2], torch.zeros(70, device="meta")])
def test_what_is_no_message_is_said(message: object) -> None:
    with pytest.raises(PayloadError, match="a message is"):
        decode(CODECS["int8"], message)  # type: ignore[arg-type]


@every_codec
def test_bytes_are_those_of_the_version(name: str) -> None:
    message = encode(CODECS[name], entries(1000), step=5, seed=7)
    digest = hashlib.blake2b(bytes(message.tolist()), digest_size=8).hexdigest()
    assert digest == GOLDEN[name]


@pytest.mark.parametrize("name", ["int8", "onebit", "topk", "powersgd", "sdp4bit"])
def test_sealed_schemes_give_the_same(name: str) -> None:
    options = {"local_size": 2} if name == "sdp4bit" else {}
    grads = [torch.randn(2000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    plain = Simulation(name, {"w": (40, 50)}, world_size=4, **options)
    sealed = Simulation(Sealed(make(name, **options)), {"w": (40, 50)}, world_size=4)
    for _ in range(3):
        assert torch.equal(plain.step(grads)[0], sealed.step(grads)[0])


def test_a_payload_changed_on_the_way_names_its_rank() -> None:
    ranks = Simulation(Sealed(make("int8")), {"w": (40, 50)}, world_size=3)
    grads = [torch.ones(2000) for _ in range(3)]
    exchanges = []
    for engine, grad in zip(ranks.engines, grads, strict=True):
        engine.begin_bucket(0, is_last=True)
        exchanges.append(engine.exchange(grad, lambda: ranks.layout))

    def changed(exchange):  # type: ignore[no-untyped-def]
        request = next(exchange)
        request.tensor[0, 100] ^= 4  # what rank 2 sends to rank 0
        while True:
            try:
                request = exchange.send((yield request))
            except StopIteration as stop:
                return stop.value

    exchanges[2] = changed(exchanges[2])
    with pytest.raises(PayloadError, match="that came from rank 2 was changed on the way"):
        simulate(exchanges)
