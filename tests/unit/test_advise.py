"""``advise``: the fastest scheme and bucket size within a budget of error, also of two schemes."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import commhooks
from commhooks.cli.app import app
from commhooks.predict import Device, Layer, Workload, advise, best_of, fabric, predict_step
from commhooks.predict.advise import Option
from commhooks.predict.pipeline import Parts, pipelined
from commhooks.predict.planned import planned
from commhooks.predict.split import Split, best_split, split_scheme

SCHEMES = {name: commhooks.make(name) for name in ("none", "int8", "topk", "powersgd")}
DEVICE = Device("some", bandwidth=1e11, call_s=1e-6, flops=1e13)
SMALL = Workload.of(
    "small", [Layer(f"{i}.weight", (200, 300 + 40 * i), 1.0) for i in range(8)], forward_s=2e-3
)
WHERE: dict[str, Any] = {"ranks": 4, "fabric": fabric("1gbe"), "device": DEVICE}


def seconds_of(assigned: list[str], cap_mb: float) -> float:
    """Returns the time of a step in which each bucket has a scheme, bucket by bucket."""
    buckets = SMALL.buckets(cap_mb=cap_mb)
    plans = [
        planned(SCHEMES[name], shapes, 4)
        for name, shapes in zip(assigned, buckets.shapes, strict=True)
    ]
    parts = Parts.empty(len(plans), max(len(plan.messages) for plan in plans), (1,))
    parts.ready[:, 0] = buckets.ready
    for b, plan in enumerate(plans):
        # One bucket alone, whose message takes the same time wherever it is in a step.
        parts.fill([DEVICE.seconds(work) for work in plan.work], (b, 0))
        for m, message in enumerate(plan.messages):
            parts.wire[b, m, 0] = _message_seconds(message)
            parts.core[b, m, 0] = message.wire_nbytes * WHERE["fabric"].core_s_per_byte
    ends = pipelined(
        parts, backward_ends=SMALL.forward_s + SMALL.backward_s, contention=DEVICE.contention
    )
    return float(ends[0]) + SMALL.optimizer_s


def _message_seconds(message: Any) -> float:
    nbytes = np.array([float(message.nbytes)])
    return float(
        commhooks.predict.collective_seconds(
            message.collective, nbytes, ranks=4, fabric=WHERE["fabric"], part=message.ranks
        )[0]
    )


@pytest.mark.parametrize("cap_mb", [0.25, 0.5])
def test_the_best_split_is_the_best_of_all(cap_mb: float) -> None:
    found = best_split(SCHEMES, SMALL, **WHERE, cap_mb=cap_mb)
    assert found is not None
    split, step = found
    count = len(SMALL.buckets(cap_mb=cap_mb).ready)
    times = {
        (first, last, lasting): seconds_of([first] * (count - lasting) + [last] * lasting, cap_mb)
        for first, last in product(SCHEMES, SCHEMES)
        if first != last
        for lasting in range(1, count)
    }
    assert step.step_s == pytest.approx(min(times.values()), rel=1e-12)
    assert times[split.first, split.last, split.count] == pytest.approx(step.step_s, rel=1e-12)
    # One scheme for all buckets is as predicted elsewhere.
    for name, scheme in SCHEMES.items():
        alone = predict_step(scheme, SMALL, **WHERE, cap_mb=cap_mb).step_s
        assert seconds_of([name] * count, cap_mb) == pytest.approx(alone, rel=1e-12)


def test_a_split_names_the_parameters_of_its_last_buckets() -> None:
    found = best_split(SCHEMES, SMALL, **WHERE, cap_mb=0.5)
    assert found is not None
    split = found[0]
    buckets = SMALL.buckets(cap_mb=0.5)
    members = [name for bucket in buckets.names[-split.count :] for name in bucket]
    assert list(split.parameters) == members
    assert "0.weight" in members  # the first layer's gradient comes last
    scheme = split_scheme(split, SCHEMES)
    for layer in SMALL.layers:
        expected = split.last if layer.name in members else split.first
        at = scheme.choose(layer.name, torch.Size(layer.shape), torch.float32)  # type: ignore[attr-defined]
        assert scheme.schemes[at] == SCHEMES[expected]  # type: ignore[attr-defined]


def test_names_that_look_like_patterns_are_names() -> None:
    split = Split("none", "int8", 1, 2, ("a[0].weight",))
    scheme: Any = split_scheme(split, SCHEMES)
    shape, dtype = torch.Size([4]), torch.float32
    assert scheme.schemes[scheme.choose("a[0].weight", shape, dtype)] == SCHEMES["int8"]
    assert scheme.schemes[scheme.choose("a0.weight", shape, dtype)] == SCHEMES["none"]


def test_one_bucket_or_one_scheme_is_not_split() -> None:
    one = Workload.of("one", [Layer("w", (200, 300), 1.0)], forward_s=2e-3)
    assert best_split(SCHEMES, one, **WHERE, cap_mb=1000) is None
    assert best_split({"none": SCHEMES["none"]}, SMALL, **WHERE, cap_mb=0.5) is None


def test_options_keep_to_the_budget_and_dense_is_always_one() -> None:
    for error in (0.0, 1e-3, 0.05, 2.0):
        options = advise(SMALL, **WHERE, candidates=["int8", "int4", "topk"], error=error)
        names = {option.name for option in options}
        assert {"none", "bf16"} <= names
        assert all(one.error <= error or one.name in ("none", "bf16") for one in options)
        steps = [option.step.step_s for option in options]
        assert steps == sorted(steps)
        # A plan of two schemes is there only if it is faster than each scheme alone.
        alone = min(one.step.step_s for one in options if one.split is None)
        assert all(one.step.step_s < 0.98 * alone for one in options if one.split is not None)


@pytest.mark.parametrize(("first_mb", "laid_out"), [(None, 0.5), (0.125, 0.125)])
def test_the_first_bucket_is_as_large_as_bucket_cap_mb_makes_it(
    first_mb: float | None, laid_out: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    split: list[dict[str, Any]] = []
    # By its name in sys.modules: `commhooks.predict.advise` is the function.
    module = sys.modules["commhooks.predict.advise"]
    monkeypatch.setattr(module, "best_split", lambda *_, **sizes: split.append(sizes))
    sizes = {"cap_mb": 0.5, "first_mb": laid_out}
    options = advise(SMALL, **WHERE, candidates=["int8"], caps_mb=[0.5], first_mb=first_mb)
    for one in options:
        assert one.step == predict_step(one.scheme, SMALL, **WHERE, **sizes)
    assert [{name: one[name] for name in sizes} for one in split] == [sizes]
    dense = [predict_step(SCHEMES["none"], SMALL, **WHERE, first_mb=one) for one in (0.5, 0.125)]
    assert dense[0].step_s != dense[1].step_s


def test_the_simpler_of_two_that_are_as_fast_is_taken() -> None:
    options = advise(SMALL, **WHERE, candidates=["int8"], error=1.0)
    one = options[0]

    def taking(name: str, step_s: float, error: float) -> Option:
        return replace(one, name=name, step=replace(one.step, step_s=step_s), error=error)

    none, bf16 = taking("none", 1.01, 0.0), taking("bf16", 1.0, 1e-6)
    assert best_of([bf16, none]) is none
    assert best_of([taking("int8", 0.9, 1e-4), bf16, none]).name == "int8"
    assert best_of([taking("int4", 0.9, 1e-2), taking("int8", 0.91, 1e-4)]).name == "int8"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["advise", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_says_what_to_write() -> None:
    text = run("--model", "resnet50", "--fabric", "1gbe", "--schemes", "int8,powersgd:rank=2")
    assert "Take int8 in buckets of" in text
    assert 'hook = commhooks.register(model, "int8")' in text
    assert "bucket_cap_mb=" in text
    assert "powersgd:rank=2 would take" in text  # beyond the budget, faster
    text = run(
        *("--model", "resnet50", "--fabric", "1gbe", "--error", "2"), "--schemes", "powersgd:rank=2"
    )
    assert 'commhooks.register(model, "powersgd", rank=2)' in text


def test_the_command_says_when_not_to_compress(tmp_path: Path) -> None:
    file = tmp_path / "options.csv"
    text = run(
        *("--model", "llama-1b", "--fabric", "dgx-h100", "--device", "h100", "--ranks", "16"),
        *("--csv", str(file)),
    )
    assert "Do not compress" in text
    table = pd.read_csv(file)
    assert {"none", "bf16", "int8"} <= set(table.scheme)
    assert (table.step_s >= table.exposed_s).all()
    assert sorted(set(table.bucket_cap_mb))[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "resnet51"), "resnet51"),
        (("--model", "resnet50", "--fabric", "nofabric"), "nofabric"),
        (("--model", "resnet50", "--schemes", "noop"), "no average"),
        (("--model", "resnet50", "--ranks", "1"), "ranks"),
        (("--model", "resnet50", "--ranks", "100000000"), "ranks"),
        (("--model", "resnet50", "--schemes", ","), "give one or more"),
        (("--model", "resnet50", "--fabric", ""), "fabric('')"),
        (("--model", "resnet50", "--csv", "/"), "is a folder"),
        (("--model", "resnet50", "--batch", "9" * 400), "batch"),
        ((), "--model or --timeline"),
    ],
)
def test_a_wrong_argument_is_a_sentence(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["advise", *arguments])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_the_lines_for_a_plan_of_two_schemes_run() -> None:
    from commhooks.cli.advise import _advice

    one = advise(SMALL, **WHERE, candidates=["int8"], error=1.0)
    split = Split("none", "powersgd:rank=4", 1, 2, ("w",))
    plan = replace(one[0], name=str(split), split=split)
    *_, made, hook = _advice(plan, [plan, *one], SMALL, 2.0)
    names: dict[str, Any] = {"commhooks": commhooks}
    exec(made.strip(), names)
    assert names["candidates"]["powersgd:rank=4"] == commhooks.make("powersgd", rank=4)
    assert hook.endswith('register(model, "auto", candidates=candidates, error=2)')
