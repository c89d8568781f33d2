"""Names, options, and what is said when they are wrong."""

import copy
import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import commhooks
from commhooks import ErrorFeedback
from commhooks.checkpoint._plain_scheme import from_plain, to_plain
from commhooks.classic._minmax import MinMax, MinMaxPerChannel
from commhooks.core import _registry as registry
from commhooks.core._registry import _factories, register_scheme
from commhooks.errors import CheckpointError, OptionError, UnknownSchemeError
from commhooks.research import baselines
from commhooks.schemes import Blockwise, Dense, PowerSGD
from commhooks.wrappers import Cast, Coalesced, DelayedStart, Guard
from tests.shelf import BASELINES, BUILT_IN


def test_names_are_sorted_and_can_all_be_made() -> None:
    assert commhooks.scheme_names() == sorted(commhooks.scheme_names())
    for name in commhooks.scheme_names():
        assert isinstance(commhooks.make(name), commhooks.Scheme)


def test_options_of_a_built_scheme_belong_to_its_class() -> None:
    with pytest.raises(OptionError, match="given as an object to its class"):
        commhooks.make(PowerSGD(), rank=2)
    with pytest.raises(TypeError, match="by name or as a Scheme"):
        commhooks.make(3)


def test_biased_schemes_get_feedback_by_name_unless_it_is_off() -> None:
    assert commhooks.make("powersgd") == ErrorFeedback(PowerSGD())
    assert commhooks.make("powersgd", error_feedback=False) == PowerSGD()
    assert commhooks.make(PowerSGD()) == PowerSGD()
    assert commhooks.make("none") == Dense()
    assert commhooks.make("none", error_feedback=True) == ErrorFeedback(Dense())


def test_wrappers_nest_in_a_fixed_order() -> None:
    made = commhooks.make("powersgd", rank=3, wire_dtype="bf16", start_step=5, coalesce=True)
    inner = ErrorFeedback(Cast(PowerSGD(rank=3), torch.bfloat16))
    assert made == Coalesced(DelayedStart(inner, 5))


def test_equal_settings_have_equal_descriptions() -> None:
    assert repr(commhooks.make("powersgd", rank=2)) == repr(ErrorFeedback(PowerSGD(rank=2)))
    assert repr(commhooks.make("powersgd", rank=2)) != repr(commhooks.make("powersgd", rank=3))


def test_a_registered_class_is_made_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Mine(Dense):
        needed: int

    monkeypatch.setitem(_factories, "test_mine", Mine)
    assert commhooks.make("test_mine", needed=2) == Mine(2)
    with pytest.raises(OptionError, match="needs the options needed"):
        commhooks.make("test_mine")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match=r"'none'.*taken"):
        register_scheme("none")(Dense)


FRESH = """
import commhooks
from commhooks.checkpoint._plain_scheme import from_plain, to_plain
from commhooks.errors import CheckpointError, UnknownSchemeError

def says(function, *args):
    try:
        return function(*args)
    except (UnknownSchemeError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"

saved = {"class": "commhooks.QSGD", "settings": {"levels": 7, "block": 128}}
print(*commhooks.scheme_names())
print(says(commhooks.make, "qsgd"))
print(says(from_plain, saved))
import commhooks.research.baselines
print(*sorted(set(commhooks.scheme_names())))
print(says(commhooks.make, "qsgd"))
print(says(from_plain, saved))
"""


def test_baselines_are_registered_by_their_import() -> None:
    """In a process of its own: another test may have imported them in this one."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built_in, no_name, no_class, names, made, loaded = done.stdout.splitlines()
    assert built_in.split() == sorted(BUILT_IN)
    assert no_name.startswith(
        "UnknownSchemeError: no scheme 'qsgd' is registered yet; "
        "`import commhooks.research.baselines` registers it"
    )
    assert no_class.startswith("CheckpointError: a saved scheme is of 'commhooks.QSGD'")
    assert "`import commhooks.research.baselines` before the state is loaded" in no_class
    assert names.split() == sorted([*BUILT_IN, *BASELINES])
    assert (made, loaded) == ("QSGD(levels=127, block=128)", "QSGD(levels=7, block=128)")


def test_the_table_of_baselines_is_what_their_package_has() -> None:
    assert sorted(registry.BASELINES.values()) == sorted(baselines.__all__)
    for name, kind in registry.BASELINES.items():
        assert registry.factory_of(name) is getattr(baselines, kind)


@pytest.mark.parametrize("kind", [MinMax(), MinMaxPerChannel(128)])
def test_the_schemes_of_torchs_quantisation_hooks_have_no_name_and_load(kind: MinMax) -> None:
    assert from_plain(to_plain(kind)) == kind
    with pytest.raises(UnknownSchemeError, match=r"no scheme 'quantization_perchannel'"):
        commhooks.make("quantization_perchannel")


NEW = """
from dataclasses import dataclass
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme

@register_scheme("lies_in_the_folder")
@dataclass(frozen=True)
class LiesInTheFolder(Scheme):
    def exchange(self, bucket):
        return (yield from bucket.all_reduce())
"""


@pytest.mark.slow
def test_a_scheme_is_one_file(tmp_path: Path) -> None:
    """Put beside the others it is registered: no list names it."""
    root = Path(commhooks.__file__).parent
    for path in root.rglob("*.py"):
        copy = tmp_path / "commhooks" / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "commhooks/schemes/new.py").write_text(NEW)
    code = "import commhooks; commhooks.make('lies_in_the_folder'); print(commhooks.__file__)"
    paths = os.pathsep.join([str(tmp_path), str(root.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": paths}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def _classes(kind: type) -> list[type]:
    return [kind, *(deeper for subclass in kind.__subclasses__() for deeper in _classes(subclass))]


def test_a_saved_scheme_is_found_whatever_file_its_class_lies_in() -> None:
    scheme = DelayedStart(Cast(PowerSGD(rank=2)), 3)
    plain = to_plain(scheme)
    assert from_plain(plain) == scheme
    plain["settings"]["before"]["class"] = "commhooks.schemes.dense.Dense"  # as once saved
    plain["settings"]["scheme"]["class"] = "commhooks.wrappers._cast.Cast"
    assert from_plain(plain) == scheme


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_saved_scheme_may_have_the_settings_of_its_time(stochastic: bool) -> None:
    scheme = Blockwise("int8", 512, "stochastic" if stochastic else "nearest")
    plain = to_plain(scheme)
    del plain["settings"]["rounding"]
    plain["settings"]["stochastic"] = stochastic
    assert from_plain(plain) == scheme
    plain["settings"]["stochastic"] = "yes"
    with pytest.raises(CheckpointError, match="unexpected keyword argument 'stochastic'"):
        from_plain(plain)


def test_a_saved_guard_may_have_what_it_does_as_settings() -> None:
    scheme = Guard(commhooks.make("int8"), every=5)
    plain = to_plain(scheme)
    plain["settings"] |= {"max_residual": 100.0, "growth": 10.0, "rest": 1000, "sample": 4096}
    assert from_plain(plain) == scheme
    plain["settings"]["rest"] = None
    with pytest.raises(CheckpointError, match=r"a Guard with another 'rest' than 1000.*state_dict"):
        from_plain(plain)


def test_a_pickle_without_rounding_is_refused() -> None:
    scheme = Blockwise("int8", 256, "stochastic")
    state = {**vars(scheme), "stochastic": True}
    assert copy.copy(scheme) == pickle.loads(pickle.dumps(scheme)) == scheme
    del state["rounding"]
    with pytest.raises(ValueError, match="the pickle has no rounding"):
        scheme.__setstate__(state)


def test_no_two_schemes_of_the_package_have_one_name() -> None:
    classes = [
        kind for kind in _classes(commhooks.Scheme) if kind.__module__.startswith("commhooks")
    ]
    assert max(Counter(kind.__qualname__ for kind in classes).values()) == 1
