"""Plausible mistakes: each is answered at once, by a message that names the rule and what came."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks import (
    DiLoCo,
    ErrorFeedback,
    HookState,
    PerParameter,
    PowerSGDState,
    Rule,
    Schedule,
    Scheme,
    Simulation,
    make,
    register_scheme,
)
from commhooks.auto import AutoHook
from commhooks.core import Bucket, Codec, Result
from commhooks.core._registry import _factories
from commhooks.core._scheme import SchemeExchange
from commhooks.errors import OptionError, SchemeError
from commhooks.hook._registration import group_function
from commhooks.optim import OneBitAdam
from commhooks.predict._advise import made_candidates
from commhooks.report._page import Page
from commhooks.research.baselines import (
    QSGD,
    AlignedTopK,
    GlobalQSGD,
    IntSGD,
    RandomBlock,
    TernGrad,
)
from commhooks.research.budget import allocate
from commhooks.research.trace import replay
from commhooks.schemes import (
    DGC,
    BatchedPowerSGD,
    Blockwise,
    DeMo,
    Dense,
    Eden,
    Hierarchical,
    OneBitMomentum,
    PowerSGD,
    RandomK,
    SignSGD,
    TopK,
)
from commhooks.wrappers import (
    EF21,
    AveragedFeedback,
    Cast,
    Coalesced,
    DelayedStart,
    FlushResidual,
    Guard,
    PeriodicDense,
    Scaled,
    TwoPhase,
)
from commhooks.wrappers._per_parameter import warn_of_idle_rules
from ddp_core import AllReduce

NAN, INF = float("nan"), float("inf")
Call = Callable[[], object]


def simulate(scheme: Any, **options: Any) -> Tensor:
    ranks = Simulation(scheme, {"p": (40, 50)}, world_size=2, **options)
    return ranks.step([torch.randn(2000) for _ in range(2)])[0]


# ---- settings: strings, floats and truths where something else belongs

# Values that are refused, by annotation, and the rule that is named.
WRONG: dict[str, tuple[tuple[object, ...], str]] = {
    "int": (("4", 2.5, 2.0, True, torch.tensor(4)), "a whole number"),
    "float": (("0.1", NAN, INF), "a finite number"),
    "bool": (("no", 1), "True or False"),
    "str": ((8,), "a string"),
    "torch.dtype": (("fp16",), "a torch.dtype"),
    "Scheme": (("int8", PowerSGD), "a Scheme"),
    "Codec": ((Dense(),), "a Codec"),
    "PackedCodec": ((Dense(), TernGrad()), "a PackedCodec"),
}
RIGHT: dict[str, object] = {
    **dict.fromkeys(("Scheme", "Codec", "PackedCodec"), Blockwise()),
    "torch.dtype": torch.float16,
    "int": 2,
    "Sequence[Rule]": (),
    "Sequence[tuple[int, Scheme]]": [(0, Dense())],
    "str | os.PathLike[str]": "x",
}


def classes_of_schemes(kind: type[Scheme] = Scheme) -> set[type[Any]]:
    """All of the package that have settings."""
    classes = {kind} if is_dataclass(kind) and kind.__module__.startswith("commhooks.") else set()
    return classes.union(*map(classes_of_schemes, kind.__subclasses__()))


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        pytest.param(kind, setting, id=f"{kind.__name__}.{setting.name}")
        for kind in sorted(classes_of_schemes(), key=lambda kind: kind.__name__)
        for setting in fields(kind)
        if str(setting.type).removesuffix(" | None") in WRONG
    ],
)
def test_a_setting_of_another_type_is_refused_by_every_scheme(
    kind: type[Any], setting: Field[Any]
) -> None:
    needed = {
        other.name: RIGHT[str(other.type)] for other in fields(kind) if other.default is MISSING
    }
    annotation = str(setting.type)
    values, rule = WRONG[annotation.removesuffix(" | None")]
    for value in values if annotation.endswith("None") else (*values, None):
        with pytest.raises((TypeError, ValueError), match=rf"\({setting.name}=\.\.\.\) is {rule}"):
            kind(**needed | {setting.name: value})


SETTINGS: list[tuple[Call, str]] = [
    (lambda: make("int8", rounding="up"), r"int8\(rounding=...\)"),
    (lambda: commhooks.schemes.int8(rounding=True), r"int8\(rounding=...\)"),
    (lambda: make("bf16", fp32_sum="no"), r"bf16\(fp32_sum=...\) is True or False, got 'no'"),
    (lambda: make("int8", coalesce="no"), r"int8\(coalesce=...\) is True or False, got 'no'"),
    (lambda: make("int8", error_feedback="no"), r"error_feedback=...\) is True or False"),
    (
        lambda: make("int8", start_step=2.5),
        r"start_step=...\) is a whole number of steps, such as 1000, got 2.5",
    ),
    (lambda: make("int8", wire_dtype="fp8"), r"wire_dtype=...\) is one of .*, got 'fp8'"),
    (lambda: make("int8", wire_dtype=torch.int8), r"wire_dtype=...\) is one of .*, got torch.int8"),
    (lambda: make("int8", wire_dtype=16), r"wire_dtype=...\) is a string or a torch.dtype"),
    (lambda: make("sdp4bit", memory="no"), r"sdp4bit\(memory=...\) is True or False"),
    (lambda: make("sdp4bit", local_size="2"), r"is a whole number or None, got '2'"),
    (lambda: make("sdp4bit", local_size=0), r"scheme 'sdp4bit': .*number of ranks, 1 or more"),
    (lambda: make("int8", block=256.0), r"int8\(block=...\) is a whole number, got 256.0"),
    (lambda: make("int8", block=100), r"scheme 'int8': Blockwise\(block\).* got 100"),
    (lambda: make("int8", pattern="ring"), r"is 'two_phase' or 'all_gather', got 'ring'"),
    (lambda: make("fp8", format="e3m4"), r"fp8\(format=...\) is 'e4m3' or .* got 'e3m4'"),
    (lambda: make("dgc", ratio=2), r"scheme 'dgc': DGC\(ratio=...\): 0 < ratio <= 1, got 2"),
    (lambda: PowerSGD(rank=0), r"PowerSGD\(rank=...\) is a whole number"),
    (lambda: BatchedPowerSGD(rank=-1), r"BatchedPowerSGD\(rank=...\) is a whole number"),
    (lambda: PowerSGD(min_compression_rate=-1), r"\(min_compression_rate=...\)"),
    (lambda: Blockwise(format="int3"), "one of int8"),
    (lambda: Blockwise("e4m3", rotate=True), "takes int8, int4, int2, sign"),
    (lambda: Blockwise(block=2048, rotate=True), "blocks of 1024 at most"),
    (lambda: Blockwise("sign", rounding="stochastic"), "a sign is not rounded"),
    (lambda: Blockwise("dithered_int8"), r"is Blockwise\('int8', rounding='dither'\)"),
    (lambda: Blockwise("int4", rounding="dither"), "takes 'int8' without rotation, got 'int4'"),
    (lambda: Blockwise(rotate=True, rounding="dither"), "got 'int8' and rotate=True"),
    (lambda: Eden(bits=5), "1 to 4"),
    (lambda: Eden(block=64), "128"),
    (lambda: GlobalQSGD(block=100), r"GlobalQSGD\(block=...\) is a multiple of 256, got 100"),
    (lambda: IntSGD(precision=0), r"IntSGD\(precision=...\) is above 0"),
    (lambda: IntSGD(decay=1), r"IntSGD\(decay=...\): 0 <= decay < 1"),
    *[
        (lambda kind=kind, ratio=ratio: kind(ratio), r"\(ratio=...\) is a share")
        for kind in (TopK, RandomK, RandomBlock)
        for ratio in (0, 1.5)
    ],
    (lambda: AlignedTopK(row=0), r"AlignedTopK\(row=...\) is a whole number"),
    (lambda: AlignedTopK(directions=0), r"AlignedTopK\(directions=...\) is a whole number"),
    (lambda: DGC(momentum=1.0), r"DGC\(momentum=...\)"),
    (lambda: DGC(clip=0.0), r"DGC\(clip=...\)"),
    (lambda: DGC(warmup_steps=-1), r"DGC\(warmup_steps=...\)"),
    (lambda: DeMo(k=0), r"DeMo\(k=...\)"),
    (lambda: DeMo(decay=1.0), r"DeMo\(decay=...\)"),
    (lambda: Hierarchical(Blockwise(pattern="all_gather"), Blockwise()), "pattern is 'two_phase'"),
    (lambda: Hierarchical(Blockwise(), Blockwise(), 0), r"local_size=...\) is a number of ranks"),
    (lambda: AveragedFeedback(TopK(), decay=1.0), "0 <= decay < 1"),
    (lambda: AveragedFeedback(TopK(), reset_every=-1), r"reset_every=...\) is a number of steps"),
    (lambda: Guard(make("int8"), every=0), r"Guard\(every=...\) is a whole number"),
    (lambda: Guard(make("int8"), max_error=0.0), r"Guard\(max_error=...\) is above 0"),
    (lambda: Guard(make("demo")), "does not give the average of gradients"),
    (lambda: Cast(Dense(), torch.float64), "float16 or bfloat16"),
    (lambda: DelayedStart(Dense(), -1), "0 or more"),
    (lambda: SignSGD(scale=-1), r"SignSGD\(scale=...\) is above 0, got -1"),
    (lambda: Schedule([(0, Dense()), (2.5, make("int8"))]), r"Schedule\(step=...\) is a whole"),
    (lambda: Schedule(make("int8")), r"Schedule\(parts=...\) takes pairs of a step and a scheme"),
    (lambda: Schedule([(0, "none")]), r"wraps a Scheme, got 'none'"),
    (lambda: Rule(Dense(), min_numel="1k"), r"Rule\(min_numel=...\) is a whole number, got '1k'"),
    (lambda: Rule("none"), r"Rule\(scheme=...\) is a Scheme, got 'none'"),
    (lambda: Rule(Dense(), name=3), r"Rule\(name=...\) is a string"),
    (lambda: Rule(Dense(), dtype="fp16"), r"Rule\(dtype=...\) is a torch.dtype or None"),
    (lambda: Rule(Dense(), min_dim=3, max_dim=1), r"no parameter is between 3 and 1"),
    (lambda: PerParameter(Rule(Dense()), Dense()), r"PerParameter\(rules=...\) is a list of Rule"),
    (lambda: replay("trace", "int8"), r"give Trace\(folder\); got 'trace'"),
    (lambda: allocate("trace", [Dense()], bits=1), r"give Trace\('trace'\)"),
    (lambda: allocate([], ["int8"], bits=1), r"allocate\(candidates=...\) is a Scheme"),
    (lambda: allocate([], "int8", bits=1), r"one scheme at least, got 'int8'"),
    (
        lambda: PowerSGDState(None, use_error_feedback="no"),
        r"PowerSGDState\(use_error_feedback=...\) is True or False",
    ),
    (lambda: PowerSGDState(None, start_powerSGD_iter=2.5), r"start_step=...\) is a whole number"),
    (lambda: OneBitAdam([torch.ones(2)], "onebit_adam"), r"this one is 'onebit_adam'"),
    (lambda: OneBitAdam([torch.ones(2)], HookState("int8")), r"this one runs Blockwise"),
    (lambda: make("auto"), r"in commhooks.register\(model, 'auto'\)"),
    (lambda: made_candidates("int8"), r"a list of names, or schemes by name: \['int8'\]"),
    (lambda: AutoHook(None, candidate=["int8"]), r"did you mean 'candidates'\?"),
    (lambda: Page("x").table(("a", "b"), [(1,)]), r"2 columns \(a, b\), and a row of 1"),
    (lambda: allocate([], [Dense()], bits="1"), r"allocate\(bits=...\) is a finite number"),
]


@pytest.mark.parametrize(("call", "words"), SETTINGS, ids=[words for _, words in SETTINGS])
def test_a_setting_of_another_type_or_size_is_refused(call: Call, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize("seed", ["a", 1.5, None, True, torch.tensor(3), 2**63])
def test_a_seed_is_a_whole_number_of_64_bits(seed: Any) -> None:
    for call in (lambda: simulate("int4", seed=seed), lambda: HookState("int4", seed=seed)):
        with pytest.raises(OptionError, match=r"\(seed=...\) is a whole number"):
            call()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_whole_numbers_of_numpy_are_whole_numbers(kind: Any) -> None:
    assert repr(PowerSGD(rank=kind(4))) == repr(PowerSGD(rank=4))
    assert make("int8", block=kind(128)) == make("int8", block=128)
    assert Rule(Dense(), max_dim=kind(1)) == Rule(Dense(), max_dim=1)
    assert Schedule([(kind(0), Dense())]) == Schedule([(0, Dense())])
    grads = [torch.randn(2000) for _ in range(2)]
    for name in ("int4", "random_k", "eden"):
        first, second = (
            Simulation(name, {"p": (2000,)}, world_size=2, seed=seed) for seed in (3, kind(3))
        )
        assert torch.equal(first.step(grads)[0], second.step(grads)[0])


def test_other_numbers_of_numpy_are_numbers_and_flags() -> None:
    assert repr(TopK(ratio=np.float32(0.5))) == repr(TopK(ratio=0.5))
    assert repr(PowerSGD(min_compression_rate=2)) == repr(PowerSGD(min_compression_rate=2.0))
    assert repr(PowerSGD(warm_start=np.bool_(False))) == repr(PowerSGD(warm_start=False))
    assert make("int8", coalesce=np.bool_(True)) == Coalesced(make("int8"))


def test_settings_of_schemes_of_ones_own_are_checked_too() -> None:
    @dataclass(frozen=True)
    class Mine(Dense):
        ratio: float
        steps: list[int] | None = None

        def __post_init__(self) -> None:
            assert self.ratio < 1

    with pytest.raises(OptionError, match=r"Mine\(ratio=...\) is a finite number, got '0.1'"):
        Mine("0.1")  # type: ignore[arg-type]
    assert Mine(0).ratio == 0.0


# ---- options: which there are, and what they are called here

OPTIONS: list[tuple[Call, str]] = [
    (lambda: make("int8", rank=4), r"'int8' has no option 'rank'. Options: block, rounding"),
    (lambda: make("int8", stochastic=False), r"no option 'stochastic'; it is called rounding here"),
    (lambda: make("bf16", rounding="x"), r"no option 'rounding'; it is called stochastic here"),
    (lambda: make("eden", rounding="x"), r"no option 'rounding'\. Options"),
    (lambda: make("int8", roundin="x"), r"'roundin'; did you mean 'rounding'\? Options"),
    (lambda: make("int4", bits=3), r"'int4' has no option 'bits'. Options: block.*coalesce$"),
    (lambda: make("powersgd", matrix_approximation_rank=4), r"it is called rank here. Options"),
    (lambda: make("powersgd", start_powerSGD_iter=4), r"it is called start_step here"),
    (lambda: make("powersgd", random_seed=1), r"register\(..., seed=...\)"),
    (lambda: make("zzz"), r"no scheme 'zzz'. Registered"),
    (lambda: make("int9"), r"no scheme 'int9'; did you mean 'int8'\? Registered"),
    (lambda: make(PowerSGD), r"got the class PowerSGD, not PowerSGD\(...\)"),
    (lambda: register_scheme(), r"one name at least"),
    (lambda: register_scheme(Dense), r"takes names, @register_scheme\(\"my_scheme\"\), got <class"),
    (lambda: register_scheme("x")(nn.Linear), r"derived from Scheme or Codec"),
    (lambda: register_scheme("x")(3), r"derived from Scheme or Codec, or a function"),
]


@pytest.mark.parametrize(("call", "words"), OPTIONS, ids=[words for _, words in OPTIONS])
def test_an_unknown_option_or_name_says_what_there_is(call: Call, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_function_that_makes_no_scheme_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_factories, "test_three", lambda: 3)
    with pytest.raises(SchemeError, match="'test_three': its function returns a Scheme, got 3"):
        make("test_three")


# ---- feedback around feedback, and other nestings without a meaning

FED = make("topk")
NESTED: list[tuple[Call, str]] = [
    (lambda: ErrorFeedback(make("onebit")), r"ErrorFeedback inside.*error_feedback=False"),
    (lambda: ErrorFeedback(make("powersgd")), r"two of them diverge"),
    (lambda: EF21(FED), r"EF21\(ErrorFeedback"),
    (lambda: Hierarchical(Blockwise(), SignSGD()), r"between=SignSGD.*else than an average"),
    (lambda: ErrorFeedback(EF21(TopK())), r"EF21 inside"),
    (lambda: ErrorFeedback(make("sdp4bit")), r"AveragedFeedback inside.*memory=False"),
    (lambda: make("sdp4bit", error_feedback=True), r"memory=False"),
    (lambda: ErrorFeedback(PerParameter([Rule(FED)], Dense())), r"ErrorFeedback\(PerParameter"),
    *[
        (lambda wrap=wrap: ErrorFeedback(wrap(FED)), r"ErrorFeedback inside")
        for wrap in (Scaled, Guard, Cast, Coalesced)
    ],
    (lambda: ErrorFeedback(PeriodicDense(FED, 2)), r"ErrorFeedback inside"),
    (lambda: ErrorFeedback(DelayedStart(FED, 2)), r"ErrorFeedback inside"),
    (lambda: ErrorFeedback(DelayedStart(Dense(), 2, before=FED)), r"ErrorFeedback inside"),
    (lambda: ErrorFeedback(Schedule([(0, Dense()), (2, FED)])), r"ErrorFeedback inside"),
    (lambda: ErrorFeedback(FlushResidual(TopK())), r"FlushResidual inside keeps residual, too"),
    (lambda: FlushResidual(FED), r"ErrorFeedback inside keeps residual, too"),
    (lambda: Guard(Guard(FED)), r"Guard inside keeps guard.dense_until"),
    *[
        (lambda name=name: ErrorFeedback(make(name)), "something else than an average")
        for name in ("dgc", "demo", "signsgd", "gossip")
    ],
    *[(lambda wrap=wrap: wrap(make("gossip")), "average of") for wrap in (EF21, Guard)],
    (lambda: OneBitMomentum(compressed=OneBitMomentum()), r"that scheme gives something else"),
    (lambda: OneBitMomentum(compressed=make("dgc")), r"that scheme gives something else"),
    (lambda: EF21(QSGD(levels=1, block=512)), r"variance of up to 22.6.*EF21\(Scaled"),
    (lambda: ErrorFeedback(TernGrad()), r"ErrorFeedback\(Scaled"),
    (lambda: ErrorFeedback(PerParameter([Rule(TernGrad())], Dense())), r"variance of up to 10.8"),
    (lambda: AveragedFeedback(QSGD(levels=1, block=2048)), r"AveragedFeedback\(Scaled"),
    (lambda: PeriodicDense(make("dgc"), 5), r"PeriodicDense\(PerParameter.*something else"),
    (lambda: PeriodicDense(make("onebit_adam"), 5), r"PeriodicDense\(OneBitMomentum"),
    (lambda: make("onebit_adam", start_step=5), r"DelayedStart\(.*set its freeze_step"),
    (lambda: Schedule([(0, Dense()), (5, make("onebit_adam"))]), r"set its freeze_step"),
]


@pytest.mark.parametrize(("call", "words"), NESTED)
def test_a_nesting_without_a_meaning_is_refused(call: Call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_nestings_with_one_feedback_are_not() -> None:
    bare = make("topk", error_feedback=False)
    for scheme in (
        ErrorFeedback(Guard(bare)),
        FlushResidual(Dense()),
        PerParameter([Rule(FED, name="p")], make("powersgd")),
        PerParameter([Rule(make("dgc"), name="p")], make("dgc", ratio=0.1)),
        Schedule([(0, make("none")), (2, FED), (3, make("powersgd"))]),
        ErrorFeedback(Hierarchical(Blockwise("int8"), Blockwise("int4"), 2)),
        EF21(Scaled(QSGD(levels=1, block=512))),
        OneBitMomentum(compressed=make("int4")),
    ):
        assert simulate(scheme).isfinite().all()


# ---- schemes of one's own that break the contract


PAYLOADS: dict[str, Any] = {"float": 1.0, "empty": {}, "of floats": {"x": 1.0}}


@dataclass(frozen=True)
class Encodes(Codec):
    """Encodes to what is no payload."""

    payload: str

    def encode(self, grad: Tensor, bucket: Bucket) -> Any:
        return PAYLOADS[self.payload]


@dataclass(frozen=True)
class Decodes(Codec):
    """Decodes to another shape, which would broadcast, or to no tensor."""

    shape: int

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return {"x": grad[: len(grad) // 4].clone()}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Any:
        return torch.ones(self.shape) if self.shape else 3.0


@dataclass(frozen=True)
class NoGenerator(Scheme):
    def exchange(self, bucket: Bucket) -> Any:
        return Result(bucket.gradient)


@dataclass(frozen=True)
class YieldsTensor(Scheme):
    def exchange(self, bucket: Bucket) -> Any:
        mean = yield bucket.gradient
        return Result(mean)


@dataclass(frozen=True)
class HandsOn(Scheme):
    """A plain function may return another scheme's generator."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return Dense().exchange(bucket)


BROKEN: list[tuple[Scheme, str]] = [
    (Encodes("float"), r"Encodes.encode returns a dict of named tensors, one at least, got 1.0"),
    (Encodes("empty"), r"one at least, got \{\}"),
    (Encodes("of floats"), r"got \{'x': 1.0\}"),
    (Decodes(0), r"Decodes.decode returns a tensor of the bucket's shape .* got 3.0"),
    (Decodes(1), r"bucket's shape .* got shape \(1,\)"),
    (NoGenerator(), r"NoGenerator.exchange is a generator.* it returned Result"),
    (YieldsTensor(), r"yields collectives, such as AllReduce\(tensor\).* yielded a Tensor"),
]


@pytest.mark.parametrize(("scheme", "words"), BROKEN)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda scheme: scheme,
        ErrorFeedback,
        Cast,
        lambda scheme: PerParameter([Rule(scheme, name="p")], Dense()),
    ],
)
def test_a_broken_contract_is_named(
    scheme: Scheme, words: str, wrap: Callable[[Scheme], Scheme]
) -> None:
    with pytest.raises((SchemeError, TypeError), match=words):
        simulate(wrap(scheme))


def test_a_codec_that_encodes_to_a_tensor_is_named_in_two_phases_too() -> None:
    @dataclass(frozen=True)
    class ToTensor(Codec):
        def encode(self, grad: Tensor, bucket: Bucket) -> Any:
            return grad

    for scheme in (ToTensor(), TwoPhase(ToTensor())):
        with pytest.raises(SchemeError, match=r"ToTensor.encode returns a dict of named"):
            simulate(scheme)


def test_an_exchange_may_be_another_schemes() -> None:
    assert simulate(HandsOn()).isfinite().all()


def test_a_scheme_is_a_frozen_dataclass() -> None:
    class Plain(Dense):
        bits: int = 3

    class Bare(Scheme):
        pass

    @dataclass
    class Changeable(Scheme):
        bits: int = 3

    with pytest.raises(TypeError, match=r"Plain declares bits and is no dataclass itself"):
        make(Plain())
    with pytest.raises(TypeError, match=r"Bare is a scheme and has to be a dataclass"):
        make(Bare())
    with pytest.raises(TypeError, match=r"Changeable .* settings can be changed"):
        make(Changeable())
    with pytest.raises(TypeError, match=r"Bare is a scheme and has to be a dataclass"):
        make(ErrorFeedback(Bare()))


def test_a_collective_is_of_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"AllReduce\(tensor\) takes a tensor, got float"):
        AllReduce(3.0)  # type: ignore[arg-type]


def test_integers_have_no_mean() -> None:
    with pytest.raises(TypeError, match=r'torch.int8 cannot hold: use AllReduce\(tensor, "sum"\)'):
        AllReduce(torch.zeros(3, dtype=torch.int8))
    assert AllReduce(torch.zeros(3, dtype=torch.int8), "sum").op == "sum"


# ---- a model that does not have what a rule or a layout asks for


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([Rule(FED, name="*.wieght")], r"Rule\(name='\*.wieght'\) matches none .* 0.weight"),
        ([Rule(FED, name="encoder.*")], r"matches none of the model's 4 parameters"),
        ([Rule(FED, role="norm")], r"Rule\(role='norm'\) matches none"),
        ([Rule(FED, dtype=torch.float16)], r"Rule\(dtype=torch.float16\) matches none"),
        ([Rule(FED), Rule(Dense(), name="*.bias")], r"never used: earlier rules take all"),
    ],
)
def test_a_rule_that_never_matches_warns_when_the_model_is_known(
    rules: list[Rule], words: str
) -> None:
    scheme = PerParameter(rules, Dense())
    with pytest.warns(UserWarning, match=words):
        HookState(Coalesced(scheme), model())


def test_an_idle_rule_names_parameters_and_not_their_pieces() -> None:
    pieces = [
        (f"{name}#{rank}", torch.Size([4]), torch.float32, None)
        for name in ("norm.weight", "head.weight")
        for rank in range(2)
    ]
    scheme = PerParameter([Rule(Dense(), name="*.qkv.weight")], Dense())
    with pytest.warns(UserWarning, match=r"the model's 2 parameters; the nearest are [^#]*$"):
        warn_of_idle_rules(scheme, pieces)


def test_change_group_without_a_group_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"change_group\(group\).* got None; .*WORLD"):
        HookState("int8", model()).change_group(None)  # type: ignore[arg-type]


def test_rules_that_match_or_are_for_any_model_are_silent() -> None:
    scheme = PerParameter([Rule(FED, name="1.*"), Rule(Dense(), min_dim=4)], make("dgc"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HookState(scheme, model())
        warn_of_idle_rules(scheme, [])


def test_a_layout_is_a_function_of_name_and_parameter() -> None:
    state = HookState("int8")
    for layout in (lambda name: name, lambda a, b, c: a):
        with pytest.raises(OptionError, match="cannot be called with a name and a parameter"):
            group_function(layout, state)  # type: ignore[arg-type]
    assert group_function(lambda name, parameter: name, state)("a", None) == "a"  # type: ignore[arg-type]


# ---- hook states and DiLoCo

OF_STATES: list[tuple[Call, str]] = [
    (lambda: HookState("int8", 3), r"HookState\(scheme, model\): a module, got int"),
    (lambda: Simulation("int8", {}, world_size=0), r"world_size=...\) is 1 or more, got 0"),
    (lambda: Simulation("int8", {}, world_size=2.0), r"world_size=...\) is a whole number"),
    (lambda: DiLoCo(torch.optim.SGD(model().parameters())), r"takes the model.* got SGD"),
    *[
        (lambda settings=settings: DiLoCo(model(), **settings), words)
        for settings, words in (
            ({"lr": "0.7"}, r"DiLoCo\(lr=...\) is a finite number, got '0.7'"),
            ({"lr": NAN}, r"DiLoCo\(lr=...\) is a finite number, got nan"),
            ({"lr": -1}, r"DiLoCo\(lr=...\) is above 0, got -1"),
            ({"every": 4, "delay": 1.5}, r"DiLoCo\(delay=...\) is a whole number, got 1.5"),
            ({"every": "4"}, r"DiLoCo\(every=...\) is a whole number"),
            ({"nesterov": "no"}, r"DiLoCo\(nesterov=...\) is True or False"),
            ({"momentum": True}, r"DiLoCo\(momentum=...\) is a finite number"),
            *[
                ({"scheme": name}, r"DiLoCo\(scheme=...\) averages outer gradients")
                for name in ("dgc", "demo", "onebit_adam", "signsgd", "gossip", "noop")
            ],
        )
    ],
]


@pytest.mark.parametrize(("call", "words"), OF_STATES)
def test_states_and_averagers_refuse_what_they_cannot_use(call: Call, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_name_for_authors_is_found_where_it_is() -> None:
    for name, home in (("AllReduce", "core"), ("TopK", "schemes"), ("Guard", "wrappers")):
        with pytest.raises(AttributeError, match=rf"it is commhooks\.{home}\.{name}$"):
            getattr(commhooks, name)
    with pytest.raises(AttributeError, match=r"import it from commhooks\.hosts\.accelerate or "):
        _ = commhooks.CommHook
    with pytest.raises(AttributeError, match=r"no attribute 'AllRedcue'$"):
        commhooks.AllRedcue  # noqa: B018
