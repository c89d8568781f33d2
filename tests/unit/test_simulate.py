"""Tests built-in models, predictions of many steps at once, and ``commhooks simulate``."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from commhooks import make
from commhooks.core import Slot
from commhooks.predict import (
    DEVICES,
    PRESETS,
    Device,
    Fabric,
    Layer,
    Link,
    PredictionError,
    Workload,
    compare,
    load_workload,
    model,
    model_of,
    predict_step,
    predict_steps,
    record,
    save_fabric,
    save_workload,
    trace_exchange,
)
from commhooks.predict._collectives import collective_seconds, shared_seconds
from commhooks.predict._device import Contention
from commhooks.predict._models import MODELS
from commhooks.predict._simulate import MARGIN, Row
from commhooks.predict._step import AT_ONCE, MAX_RANKS, Parts, exchanges_of, pipelined
from tests.tools.command_line import run_cli

A100 = DEVICES["a100"]

# ---- models

# Parameters: torchvision's weights (num_params); Vogels et al. 2019 (7730 MB in 70 steps, and the
# matrices of appendix F); the model cards of Hugging Face; github.com/Adnan082/diloco-measured.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "lstm": 28_949_319,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "diloco-30m": 30_846_720,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    assert model(name).numel == PUBLISHED[name]


# torchvision's weights (GFLOPS, of which one is a multiplication with an addition).
@pytest.mark.parametrize(
    ("name", "gmac"), [("resnet18", 1.81), ("resnet50", 4.09), ("vgg16", 15.47)]
)
def test_convolutions_have_the_published_number_of_operations(name: str, gmac: float) -> None:
    assert model(name).flops / 2e9 == pytest.approx(gmac, abs=0.006)


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-1b", "llama-8b"])
def test_a_language_model_takes_two_operations_per_parameter_and_token(name: str) -> None:
    # Kaplan et al., 2020: 2 N per token, besides attention, which is less than a third here.
    tokens = int(model(name).sample.split()[0])
    assert 1.0 <= model(name).flops / (2 * model(name).numel * tokens) <= 1.33


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    c_in = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(c_in, width, 3, padding=1), nn.ReLU()]
            c_in = width
        layers.append(nn.MaxPool2d(2))
    sizes = (512 * 7 * 7, 4096, 4096, 1000)
    top = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers, nn.Flatten(), *top)


class Words(nn.Module):
    """The LSTM of the PowerSGD paper; the output layer is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(28869, 650)
        self.rnn = nn.LSTM(650, 650, 3, batch_first=True)
        self.decoder = nn.Linear(650, 28869)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(words))[0])


def test_a_module_is_counted_as_the_built_in_model_is() -> None:
    with torch.device("meta"):
        counted = model_of(vgg16(), torch.empty(2, 3, 224, 224))
    built_in = model("vgg16")
    assert [layer.shape for layer in counted.layers] == [layer.shape for layer in built_in.layers]
    assert [layer.flops for layer in counted.layers] == [layer.flops for layer in built_in.layers]


def test_a_tied_layer_counts_after_the_parameter_before_it() -> None:
    with torch.device("meta"):
        counted = model_of(Words(), torch.zeros(4, 30, dtype=torch.int64))
    built_in = model("lstm")
    assert [layer.shape for layer in counted.layers] == [layer.shape for layer in built_in.layers]
    assert counted.flops == built_in.flops
    assert (counted.layers[0].name, counted.layers[0].flops) == ("encoder.weight", 0.0)


def test_counting_leaves_the_module_as_it_is() -> None:
    module = nn.Linear(3, 5).train()
    before = module.weight.clone()
    assert model_of(module, torch.ones(7, 3)).flops == 2 * 3 * 5
    assert module.weight.device.type == "cpu"
    assert torch.equal(module.weight, before)
    assert not module._forward_pre_hooks


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def test_a_module_that_reads_its_activations_is_refused() -> None:
    with pytest.raises(PredictionError, match=r"model_of\(Reads\).*record steps"):
        model_of(Reads(3, 3), torch.ones(2, 3))


def test_a_workload_takes_the_time_of_its_operations() -> None:
    device = Device("d", bandwidth=1e9, call_s=0.0, flops=1e12)
    tripled = model("gpt2").workload(device, batch=3)
    assert tripled.forward_s == pytest.approx(3 * model("gpt2").flops / 1e12)
    assert tripled.backward_s == 2 * tripled.forward_s
    assert tripled.optimizer_s == pytest.approx(28 * 124_439_808 / 1e9)
    for batch, on in ((0, device), (1, replace(device, flops=math.nan))):
        with pytest.raises(ValueError, match=r"Model\.workload"):
            model("gpt2").workload(on, batch=batch)
    with pytest.raises(ValueError, match="models are resnet18"):
        model("gpt3")


def test_a_workload_survives_a_file(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    recorded = record(module, lambda: module(torch.ones(5, 30)).sum().backward(), steps=2)
    save_workload(recorded, tmp_path / "w.json")
    assert load_workload(tmp_path / "w.json") == recorded
    (tmp_path / "w.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="not a workload's file"):
        load_workload(tmp_path / "w.json")


LAYER = {"name": "w", "shape": [10, 10], "flops": 1.0}
STEP = {"name": "x", "layers": [LAYER], "forward_s": 0.1, "backward_s": 0.2}


WRONG: dict[str, list[Any]] = {
    "name": [3],
    "forward_s": [-1, math.nan, math.inf, "long"],
    "per_bucket_overhead_s": ["long", -1.0],
    "ready_s": [[1, 2, 3], [math.nan], [-1], ["soon"], 5],
    "layers": [
        [LAYER | {field: value}]
        for field, values in {
            "shape": ([-1], [2.5], "ab"),
            "flops": (-1, "many"),
            "name": (None,),
        }.items()
        for value in values
    ],
}


@pytest.mark.parametrize(
    ("field", "wrong"), [(k, v) for k, values in WRONG.items() for v in values]
)
def test_a_workload_of_wrong_numbers_is_refused_with_its_name(
    tmp_path: Path, field: str, wrong: Any
) -> None:
    file = tmp_path / "w.json"
    file.write_text(json.dumps(STEP))
    assert load_workload(file).numel == 100
    file.write_text(json.dumps(STEP | {field: wrong}))
    with pytest.raises(ValueError, match=r"w\.json.*not a workload's file"):
        load_workload(file)
    for command in ("simulate", "advise"):
        run_cli(command, "--timeline", file, code=2)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_bucket_has_a_size(wrong: float) -> None:
    for sizes in ({"cap_mb": wrong}, {"first_mb": wrong}):
        with pytest.raises(ValueError, match=r"Workload\.buckets\(cap_mb, first_mb\)"):
            SMALL.buckets(**sizes)


def test_too_many_ranks_are_refused_before_they_are_counted() -> None:
    for ranks in (0, MAX_RANKS + 1, 10**400):
        with pytest.raises(ValueError, match=r"numbers of ranks from 1 to 16,384"):
            predict_step(make("none"), SMALL, ranks=ranks, fabric=SLOW, device=A100)
    with pytest.raises(ValueError, match="one or more, got none"):
        compare(SMALL, {}, ranks=[2], fabrics=[], device=A100)


def test_accumulation_adds_passes_and_exposes_as_much() -> None:
    single, many = SMALL, SMALL.accumulated(4)
    passes = 3 * (single.forward_s + single.backward_s)
    assert many.compute_s == pytest.approx(single.compute_s + passes)
    for name in ("none", "powersgd"):
        step, more = (
            predict_step(make(name), workload, ranks=4, fabric=SLOW, device=A100)
            for workload in (single, many)
        )
        assert step.exposed_s > 0
        assert more.exposed_s == pytest.approx(step.exposed_s)
        assert more.step_s == pytest.approx(step.step_s + passes)
    assert single.accumulated(1) == single
    with pytest.raises(ValueError, match="passes"):
        single.accumulated(0)


# ---- many steps at once

SMALL = Workload(
    "small", tuple(Layer(f"w{i}", (300, 400), 1.0) for i in range(9)), 0.001, 0.003, 0.0005
)
SLOW = Fabric("slow", Link(1e-4, 2e8), library="gloo", cpu_s_per_byte=2e-9)
# A line on which messages of several buckets are under way together.
FAR = Fabric("far", Link(0.02, 1e8), library="gloo", cpu_s_per_byte=2e-9, overlap=0.75)
# A node of four, so that hierarchical schemes and links inside nodes take part.
NODES = Fabric("nodes", Link(1e-5, 1e9), inside=Link(1e-6, 1e10), ranks_per_node=4)
# Schemes that have no message, one, two, other ones with many ranks, or parts of the ranks.
NAMES = ["noop", "none", "bf16", "int8", "powersgd", "topk", "gossip", "sdp4bit"]
RANKS = [2, 3, 8, 300]


def in_order_of_time(
    ready: Sequence[float],
    codec: Sequence[Sequence[float]],
    wire: Sequence[Sequence[float]],
    core: Sequence[Sequence[float]],
    workload: Workload,
    contention: Contention,
    *,
    shared: Sequence[Sequence[float]],
    limited: Sequence[Sequence[bool]],
    overlap: Sequence[Sequence[float]],
) -> float:
    """Returns the end of a step, event after event: the rule in plain Python."""
    ends = workload.forward_s + workload.backward_s
    link_free = device_free = delay = 0.0
    finished = ends
    due = [(moment, bucket, 0) for bucket, moment in enumerate(ready)]
    places = [[0.0] * AT_ONCE for _ in range(max(map(len, wire), default=0))]
    while due:
        due.sort()
        moment, bucket, part = due.pop(0)
        begin = max(moment + (delay if part == 0 else 0.0), device_free)
        device_free = begin + codec[bucket][part]
        if begin < ends + delay:
            taken = contention.later if part else contention.first
            delay += taken * codec[bucket][part]
        if part == len(wire[bucket]):
            finished = max(finished, device_free)
            continue
        latency = shared[bucket][part]
        sends = device_free
        device_free = sends + overlap[bucket][part]
        if sends < ends + delay:
            delay += contention.later * overlap[bucket][part]
        begin, seconds = max(link_free, sends), wire[bucket][part] - latency
        sent = link_free = begin + seconds
        if seconds:
            beside = min(max((ends + delay - begin) / seconds, 0.0), 1.0)
            delay += contention.moving * core[bucket][part] * beside
        if limited[bucket][part]:
            free = min(places[part])
            sent = max(sent, free + seconds)
            places[part].remove(free)
            places[part].append(sent + latency)
        due.append((sent + latency, bucket, part + 1))
    return max(finished, ends + delay) + workload.optimizer_s


def seconds_of(message: Any, ranks: int, fabric: Fabric, how: Any) -> float:
    where = {"ranks": ranks, "fabric": fabric, "part": message.ranks}
    return float(how(message.collective, message.nbytes, **where))


def test_all_steps_at_once_are_those_of_single_predictions_and_of_the_plain_rule() -> None:
    schemes, device = [make(name) for name in NAMES], DEVICES["cpu"]
    fabrics = [SLOW, NODES, FAR]
    steps = predict_steps(schemes, SMALL, ranks=RANKS, fabrics=fabrics, device=device, cap_mb=1)
    for s, scheme in enumerate(schemes):
        for r, ranks in enumerate(RANKS):
            buckets, exchanges = exchanges_of(scheme, SMALL, ranks, cap_mb=1)
            for f, fabric in enumerate(fabrics):
                step = steps[s, r, f]
                single = predict_step(
                    scheme, SMALL, ranks=ranks, fabric=fabric, device=device, cap_mb=1
                )
                assert step.step_s == single.step_s, (scheme, ranks, fabric.name)
                assert step.wire_nbytes == single.wire_nbytes
                messages = [exchange.messages for exchange in exchanges]
                wire, shared = (
                    [[seconds_of(sent, ranks, fabric, how) for sent in of] for of in messages]
                    for how in (collective_seconds, shared_seconds)
                )
                limited = [[sent.collective == "all_reduce" for sent in of] for of in messages]
                core = [
                    [sent.wire_nbytes * fabric.cpu_s_per_byte for sent in of] for of in messages
                ]
                parts = [device.parts(scheme, shapes, ranks) for shapes in buckets.shapes]
                end = in_order_of_time(
                    buckets.ready.tolist(),
                    [seconds[::2] for seconds in parts],
                    wire,
                    core,
                    SMALL,
                    device.contention,
                    shared=shared,
                    limited=limited,
                    overlap=[seconds[1::2] for seconds in parts],
                )
                assert step.step_s == end, (scheme, ranks, fabric.name)
                assert step.wire_s == pytest.approx(sum(map(sum, wire)))
                assert step.codec_s == pytest.approx(sum(map(sum, parts)))
                assert step.rounds == sum(map(len, wire))


_SHARES = Contention(first=0.75, later=0.5, moving=0.25)


def test_cases_of_different_sizes_do_not_disturb_each_other() -> None:
    random = np.random.default_rng(0)
    count, buckets, rounds = 300, 4, 3
    parts = Parts.empty(buckets, rounds, (count,))
    # Whole numbers, so that many events are due at the same time.
    for array in (parts.codec, parts.overlap, parts.wire, parts.core):
        array[:] = random.integers(0, 4, array.shape)
    parts.shared[:] = random.integers(0, 1 + parts.wire.astype(np.int64))
    parts.limited[:] = random.integers(0, 2, parts.limited.shape)
    parts.ready[:] = np.sort(random.integers(0, 12, parts.ready.shape), axis=0)
    parts.rounds[:] = random.integers(0, rounds + 1, parts.rounds.shape)
    have = random.integers(0, buckets + 1, count)
    for case in range(count):
        parts.ready[have[case] :, case] = np.inf
    ends = pipelined(parts, backward_ends=12.0, contention=_SHARES)
    workload = Workload("whole", (), 4.0, 8.0)
    for case in range(count):
        sent = parts.rounds[: have[case], case]
        expected = in_order_of_time(
            parts.ready[: have[case], case].tolist(),
            [parts.codec[b, : n + 1, case].tolist() for b, n in enumerate(sent)],
            [parts.wire[b, :n, case].tolist() for b, n in enumerate(sent)],
            [parts.core[b, :n, case].tolist() for b, n in enumerate(sent)],
            workload,
            _SHARES,
            shared=[parts.shared[b, :n, case].tolist() for b, n in enumerate(sent)],
            limited=[parts.limited[b, :n, case].tolist() for b, n in enumerate(sent)],
            overlap=[parts.overlap[b, :n, case].tolist() for b, n in enumerate(sent)],
        )
        assert ends[case] == expected, case


LONG = Fabric("long line", Link(0.04, 1e8), library="gloo", overlap=1.0)


def on_long_line(scheme: str, fabric: Fabric = LONG, **options: Any) -> float:
    """Returns the seconds that a step of two ranks takes beyond its computing."""
    device = Device("free", math.inf, 0.0, math.nan)
    return predict_step(
        make(scheme), EVENLY, ranks=2, fabric=fabric, device=device, cap_mb=1, **options
    ).exposed_s


# Nine buckets of 1 MiB, which are all ready when backward ends.
EVENLY = Workload(
    "evenly", tuple(Layer(f"w{i}", (512, 512), float(i == 8)) for i in range(9)), 0.1, 0.1
)


def test_messages_between_pairs_share_the_latency_and_bytes_follow_each_other() -> None:
    # Measured over 1 Gbit/s with 20 ms of delay: one all-gather of 1 MiB takes 49 ms, eight at once
    # take 110 ms.
    buckets, exchanges = exchanges_of(make("topk"), EVENLY, 2, cap_mb=1)
    assert len(buckets.ready) == 9
    sent = sum(exchange.messages[0].nbytes for exchange in exchanges) / 1e8
    assert on_long_line("topk") == pytest.approx(0.04 + sent)
    one_by_one = replace(LONG, overlap=0.0)
    assert on_long_line("topk", one_by_one) == pytest.approx(9 * 0.04 + sent)


def test_two_all_reduces_run_at_once_in_a_lane() -> None:
    # Of nine buckets the last one's is the fifth in its place; each takes two times the latency.
    bytes_s = 2**20 / 1e8
    assert on_long_line("none") == pytest.approx(5 * (2 * 0.04 + bytes_s), rel=0.1)
    assert torch.distributed.ProcessGroupGloo._Options()._threads == AT_ONCE


def test_one_bucket_takes_as_long_whatever_the_messages_of_others_share() -> None:
    single = replace(EVENLY, layers=EVENLY.layers[:1])
    for name in ("none", "int8", "powersgd", "topk"):
        times = [
            predict_step(make(name), single, ranks=2, fabric=fabric, device=A100).step_s
            for fabric in (LONG, replace(LONG, overlap=0.0))
        ]
        assert times[0] == pytest.approx(times[1])


def test_initial_values_are_not_computed_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "initial", lambda *_: pytest.fail("as large as the model"))
    threads = torch.get_num_threads()
    shapes = (torch.Size([2**16, 2**15]),)
    assert trace_exchange(make("int4"), shapes, 8).messages[0].nbytes > 2**30
    assert torch.get_num_threads() == threads


# ---- where a scheme stops paying

FREE = Device("free", math.inf, 0.0, math.nan)
CARD = replace(SLOW, cpu_s_per_byte=0.0)  # a network card that moves the bytes by itself


def rows(schemes: Sequence[str], **options: Any) -> dict[tuple[str, int], Row]:
    settings = {"ranks": [2], "fabrics": [CARD], "device": FREE, **options}
    comparison = compare(SMALL, {name: make(name) for name in schemes}, **settings)
    return {(row.scheme, row.ranks): row for row in comparison.rows()}


def test_a_scheme_pays_up_to_the_bandwidth_at_which_bf16_is_as_fast() -> None:
    row = rows(["int8"])["int8", 2]
    assert row.pays_from == 0.0
    assert CARD.between.bandwidth < row.pays_to < 1e11
    at = replace(CARD, between=replace(CARD.between, bandwidth=row.pays_to))
    assert rows(["int8"], fabrics=[at])["int8", 2].speedup == pytest.approx(1 + MARGIN, abs=0.005)


def test_dense_gradients_pay_where_a_cast_takes_longer_than_the_message() -> None:
    device = Device("slow memory", 1e9, 0.0, math.nan)
    row = rows(["none"], device=device)["none", 2]
    assert CARD.between.bandwidth < row.pays_from < 1e11
    assert row.pays_to == math.inf
    slower = replace(device, bandwidth=1e6)
    assert math.isnan(rows(["int4"], device=slower)["int4", 2].pays_from)


def test_bytes_of_ranks_and_links() -> None:
    row = rows(["none"], ranks=[8])["none", 8]
    assert row.rank_nbytes == pytest.approx(2 * 7 / 8 * 4 * SMALL.numel)
    assert row.link_nbytes == pytest.approx(row.rank_nbytes)
    inside = replace(NODES, library="gloo")  # a ring, which leaves a node once
    row = rows(["none"], ranks=[4, 8], fabrics=[inside])
    assert row["none", 4].link_nbytes == 0.0
    assert row["none", 8].link_nbytes == pytest.approx(row["none", 8].rank_nbytes)


def test_a_comparison_needs_two_ranks() -> None:
    for ranks in ([], [1, 4]):
        with pytest.raises(ValueError, match="2 at least"):
            rows(["int8"], ranks=ranks)


# ---- the command


def simulate(*arguments: object, code: int = 0) -> str:
    return run_cli("simulate", *arguments, code=code, columns=80)


OWN = """
import torch
from torch import nn
from commhooks.predict import Layer, Workload


def build():
    return nn.Linear(1000, 2000), torch.empty(8, 1000)


def steps():
    return Workload.of("own", [Layer("w", (1000, 1000), 1.0)], forward_s=0.001)


def wrong():
    return 3


def nothing():
    return nn.ReLU(), torch.empty(3)


def words():
    return nn.Linear(3, 3), "three"


def fails():
    raise RuntimeError("no such data")


def empty():
    return ()
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_simulate_prints_a_table_and_writes_files(tmp_path: Path) -> None:
    output = simulate(
        *("--model", "diloco-30m", "--schemes", "int8,powersgd:rank=4", "--ranks", "4,64"),
        *("--network", "1gbe,dgx-h100", "--csv", tmp_path / "s.csv", "--plot", tmp_path / "s.png"),
    )
    assert max(map(len, output.replace(str(tmp_path), "").splitlines())) <= 80
    assert "powersgd:rank=4" in output
    assert "int8: faster than bf16 on 1gbe with 2 to" in output
    with (tmp_path / "s.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * 2 * 3
    workload, where = model("diloco-30m").workload(A100), {"fabric": PRESETS["dgx-h100"]}
    by_hand = predict_step(make("powersgd", rank=4), workload, ranks=64, device=A100, **where)
    place = {"fabric": "dgx-h100", "ranks": "64", "scheme": "powersgd:rank=4"}
    (row,) = (row for row in table if place.items() <= row.items())
    assert float(row["step_s"]) == by_hand.step_s
    assert (tmp_path / "s.png").stat().st_size > 10_000


@pytest.mark.parametrize(("function", "name"), [("build", "Linear"), ("steps", "own")])
def test_simulate_takes_a_model_of_ones_own(own_file: Path, function: str, name: str) -> None:
    path = f"{own_file}:{function}"
    assert name in simulate("--model", path, "--schemes", "none", "--ranks", "2")


def test_simulate_takes_a_recorded_step_and_a_measured_link(tmp_path: Path) -> None:
    save_workload(SMALL, tmp_path / "w.json")
    save_fabric(SLOW, tmp_path / "link.json")
    files = ("--timeline", tmp_path / "w.json", "--network", tmp_path / "link.json")
    output = simulate(*files, "--schemes", "none", "--ranks", "2")
    assert "small" in output
    assert "slow" in output


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "advise"])
def test_schemes_are_timed_here_for_a_recorded_step(command: str, tmp_path: Path) -> None:
    save_workload(SMALL, tmp_path / "w.json")
    given = ("--timeline", tmp_path / "w.json", "--device", "here", "--ranks", "2")
    assert "cpu" in run_cli(command, *given, "--schemes", "bf16")


@pytest.mark.parametrize("command", ["simulate", "advise"])
def test_a_step_of_several_passes_computes_longer(command: str) -> None:
    given = (command, "--model", "resnet50", "--ranks", "2", "--schemes", "int8")
    for passes, shown in (("1", "25.6 ms"), ("4", "101 ms")):
        output = run_cli(*given, "--accumulate", passes)
        assert f"{shown} of computing" in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "advise"])
def test_a_link_that_was_measured_on_one_machine_is_reported(command: str, tmp_path: Path) -> None:
    from commhooks.predict._fabric import COPIED

    link = Link(1e-4, 1e9)
    here = Fabric("here", link, inside=link, ranks_per_node=2, library="gloo", source=COPIED)
    save_fabric(here, tmp_path / "link.json")
    advised = "torchrun --standalone --nproc-per-node 4 -m commhooks link"
    for ranks, shown in (("2", False), ("4", True)):
        given = ("--model", "lstm", "--network", tmp_path / "link.json", "--ranks", ranks)
        assert (advised in " ".join(run_cli(command, *given).split())) == shown


@pytest.mark.parametrize("command", ["simulate", "advise"])
def test_the_batch_and_the_default_device_are_printed(command: str) -> None:
    given = (command, "--model", "bert-base", "--ranks", "2", "--schemes", "int8")
    output = " ".join(run_cli(*given).split())
    assert "109.5 M parameters, 32 samples of 128 tokens per rank, on" in output
    assert "a100 (--device a100 is the default)" in output
    output = " ".join(
        run_cli(*given, "--batch", "1", "--device", "l4", "--accumulate", "2").split()
    )
    assert ", 1 sample of 128 tokens per rank in each of 2 passes, on" in output
    assert "is the default" not in output


def test_one_box_is_reported_without_links_between_boxes() -> None:
    given = ("--model", "bert-base", "--network", "pcie3", "--schemes", "int8,powersgd")
    output = simulate(*given, "--ranks", "8")
    assert "powersgd: faster than bf16 on pcie3 with 2 to 8 ranks" in output
    assert "nodes" not in output
    assert "anywhere" not in output
    output = simulate(*given, "--ranks", "8,16")
    assert "by node" in output
    assert "between nodes" in output


def test_two_files_of_link_are_distinguished(tmp_path: Path) -> None:
    # Both have the name "measured" inside.
    for name, bandwidth in (("slow", 1e8), ("fast", 1e10)):
        save_fabric(Fabric("measured", Link(1e-4, bandwidth)), tmp_path / f"{name}.json")
    files = f"{tmp_path / 'slow.json'},{tmp_path / 'fast.json'},{tmp_path / 'slow.json'}"
    given = ("--model", "lstm", "--schemes", "none", "--ranks", "2", "--network", files)
    output = simulate(*given, "--csv", tmp_path / "s.csv")
    with (tmp_path / "s.csv").open() as file:
        table = [(row["fabric"], row["scheme"]) for row in csv.DictReader(file)]
    assert table == [
        (str(tmp_path / f"{name}.json"), scheme)
        for name in ("slow", "fast")
        for scheme in ("bf16", "none")
    ]
    assert sum(" none " in line for line in output.splitlines()) == 2


@pytest.mark.parametrize("command", ["simulate", "advise"])
def test_a_name_in_a_file_is_no_markup(command: str, tmp_path: Path) -> None:
    save_fabric(Fabric("[red]mine[/nope]", Link(1e-4, 1e9)), tmp_path / "link.json")
    save_workload(replace(SMALL, name="[b]step[/none]"), tmp_path / "step.json")
    files = ("--timeline", tmp_path / "step.json", "--network", tmp_path / "link.json")
    output = run_cli(command, *files, "--ranks", "2", "--schemes", "none")
    assert "[red]mine[/nope]" in output
    assert "[b]step[/none]" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --model or --timeline"),
        (["--model", "gpt3"], "neither FILE.py:FUNCTION nor one of resnet18"),
        (["--model", "none.py:build"], "no file none.py"),
        (["--model", "OWN:absent"], "has no absent"),
        (["--model", "OWN:wrong"], r"returns \(module, example input"),
        (["--model", "OWN:fails"], "line 28: RuntimeError: no such data"),
        (["--timeline", "none.json"], "no such file"),
        (["--model", "lstm", "--schemes", "int9"], "no scheme 'int9'"),
        (["--model", "lstm", "--schemes", "powersgd:rank"], "powersgd:rank=4"),
        (["--model", "lstm", "--schemes", "powersgd:rank=x"], "rank"),
        (["--model", "lstm", "--network", "10gb"], "'10gb': neither .* mean '10gbe'"),
        (["--model", "lstm", "--device", "a11"], "devices are cpu"),
        (["--model", "lstm", "--device", "here"], "times schemes, not lstm: record a step"),
        (["--model", "OWN:build", "--device", "here"], "times schemes, not"),
        (["--model", "lstm", "--ranks", "2,many"], "whole numbers from 2 to"),
        (["--model", "lstm", "--ranks", "1"], "whole numbers from 2 to"),
        (["--model", "lstm", "--csv", "/none/s.csv"], "there is no folder /none"),
        (["--model", "lstm", "--csv", "/"], "is a folder; name a file"),
        (["--model", "lstm", "--bucket-mb", "inf"], "--bucket-mb"),
        (["--model", "lstm", "--network", ""], "--network '': give one or more, with commas"),
        (["--model", "lstm", "--schemes", ""], "--schemes '': give one or more, with commas"),
        (["--model", "lstm", "--schemes", "OWN"], "registers no scheme"),
        (["--model", "lstm", "--schemes", "int8,OWN"], "registers no scheme"),
        (["--model", "OWN:empty"], r"empty\(\) returns \(module, example input"),
        (
            ["--model", "lstm", "--csv", "/x.png", "--plot", "/./x.png"],
            "--csv and --plot are two files, got /x.png for both",
        ),
        (["--model", "lstm", "--schemes", "powersgd:rank=4:rank=5"], "rank is given twice"),
        (["--model", "lstm", "--ranks", ""], "--ranks '': give one or more, with commas"),
        (["--model", "lstm", "--ranks", "16385"], "whole numbers from 2 to 16,384"),
        (["--model", "lstm", "--batch", "9" * 400], "--batch"),
        (["--model", "lstm", "--accumulate", "9" * 400], "--accumulate"),
        (["--model", "OWN:nothing"], "0 parameters and 0 s"),
        (["--model", "OWN:words"], "words.*: .*TypeError: linear"),
        (["--model", "lstm", "--plot", "x.txt"], "says its format, got 'x.txt': one of .*.png"),
        (["--model", "lstm", "--plot", "/"], "is a folder; name a file"),
        (["--model", "lstm", "--list-fabric"], "No such option: --list-fabric"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    own_file: Path, arguments: list[str], message: str
) -> None:
    output = simulate(*(word.replace("OWN", str(own_file)) for word in arguments), code=2)
    text = re.sub(r"[\s│]+", " ", output)
    assert re.search(message.replace(" ", r"\s*"), text), output
    assert "Traceback" not in output
