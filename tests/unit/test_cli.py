"""The command line."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import commhooks
import commhooks.research.baselines
from commhooks import Scheme, __main__, make, scheme_names
from commhooks.cli import _catalogue as _catalogue
from commhooks.cli import _commands as _commands
from commhooks.cli import _doctor as _doctor
from commhooks.cli import _progress as _progress
from commhooks.cli._app import app
from commhooks.cli._tradeoff import Point, drawn, with_fronts
from commhooks.core import _registry as _registry
from commhooks.kernels import use_kernels
from commhooks.kernels.runtime import cpu, cuda
from commhooks.kernels.runtime import op as _op
from commhooks.report._style import RED
from commhooks.research import conformance
from commhooks.research.conformance import LAWS
from commhooks.research.trace import Trace, replay
from commhooks.wrappers._traced import write
from tests.shelf import BASELINES, BUILT_IN
from tests.tools.command_line import run_cli

_COMMANDS = [command.callback.__name__ for command in app.registered_commands]


def row(output: str, name: str) -> str:
    (shown,) = (line for line in output.splitlines() if f" {name} " in line)
    return shown


# ---- help


@pytest.mark.parametrize("command", ["", *_COMMANDS])
def test_the_help_fits_eighty_columns_without_names_of_types(command: str) -> None:
    output = run_cli(*command.split(), "--help", columns=80)
    assert max(map(len, output.splitlines())) <= 80
    assert not re.search(r"[<>]|range|\[\d|…", output)


def test_commands_are_in_panels_in_the_order_of_use() -> None:
    output = run_cli("--help", columns=80)
    words = re.findall(r"^(?:╭─|│) (\w[\w ]*?)(?: ─|  )", output, re.MULTILINE)
    assert [word for word in words if word != "Options"] == [
        *("Is it worth it", "headroom", "link", "advise", "simulate"),
        *("Schemes", "schemes", "tradeoff", "new", "check"),
        *("Installation", "doctor"),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("advise --ranks abc", "a whole number from 2 to 16,384, got 'abc'"),
        ("advise --ranks 1", "a whole number from 2 to 16,384, got '1'"),
        ("advise --max-error nan", "a number, 0 or more, got 'nan'"),
        ("simulate --bucket-mb x", "a number from 0.001 to 1,000,000, got 'x'"),
        ("headroom --steps 3 -- true", "a whole number, 10 or more, got '3'"),
        ("tradeoff --ranks 0", "a whole number, 1 or more, got '0'"),
        ("link --device tpu", "cpu or cuda, got 'tpu'"),
        ("simulate --device 12:x", "two figures of a data sheet, TFLOPS:GB/s, as in 120:600"),
    ],
)
def test_a_wrong_value_is_answered_in_words_of_this_package(arguments: str, words: str) -> None:
    output = " ".join(run_cli(*arguments.split(), code=2).replace("│", "").split())
    assert f"Invalid value for '{arguments.split()[1]}': {words}" in output or "device(" in output
    assert words in output
    assert "Input should be" not in output


@pytest.mark.parametrize("total", [1, 3])
def test_progress_in_a_log_is_a_line_now_and_then(
    total: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 100, 20))
    monkeypatch.setattr(_progress.time, "monotonic", lambda: float(next(now)))
    assert list(_progress.tracked("abc"[:total], "letters", total)) == list("abc"[:total])
    written = capsys.readouterr()
    lines = ["letters: 1 of 3, about 40 s to go", "letters: 2 of 3, about 20 s to go"]
    assert written.err.splitlines() == (lines if total == 3 else [])
    assert not written.out


# ---- doctor


def test_doctor_says_which_kernels_run_and_that_two_processes_exchange() -> None:
    output = run_cli("doctor")
    assert cpu.instruction_set() in row(output, "CPU kernels")
    assert re.search(r"(\d+) of \1 ops: CPU kernel +│$", row(output, "ops"))
    assert 'an all-reduce with "int8" works over gloo' in row(output, "2 processes")
    assert len(output.splitlines()) <= 12


def test_doctor_says_why_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "exchange_of_two", lambda: ("no time for it", False))
    with mock.patch.object(cpu, "_library", return_value=None):
        output = run_cli("doctor", code=1)
    assert "install g++" in row(output, "CPU kernels")
    assert "0 of " in row(output, "ops")
    assert "PyTorch fallback" in row(output, "ops")
    assert "no time for it" in row(output, "2 processes")


LOST = """
import sys, time
if sys.argv[2] == "0":
    time.sleep(60)
raise ValueError("lost")
"""


@pytest.mark.parametrize(
    ("limit_s", "code", "words"),
    [
        (60.0, LOST, "rank 1 ended with exit code 1: ValueError: lost"),
        (0.5, "import time; time.sleep(60)", "within 0 s. .* GLOO_SOCKET_IFNAME"),
    ],
)
def test_two_processes_that_do_not_exchange_are_ended_and_explained(
    limit_s: float, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pair_that_fails.py").write_text(code)
    monkeypatch.setattr(_doctor._pair, "__file__", str(tmp_path / "pair_that_fails.py"))
    begin = time.monotonic()
    answer, works = _doctor.exchange_of_two(limit_s)
    assert time.monotonic() - begin < 40  # nobody waits for a process that sleeps
    assert not works
    assert re.search(words, answer)


# ---- schemes


@pytest.fixture
def forget_new_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_factories", dict(_registry._factories))


def test_schemes_lists_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, shown = _catalogue._bits, {repr(make(name)) for name in ("int8", "onebit_adam")}
    monkeypatch.setattr(
        _catalogue, "_bits", lambda scheme: bits(scheme) if repr(scheme) in shown else "0"
    )
    output = run_cli("schemes")
    assert set(scheme_names()) <= set(output.split())
    assert "Blockwise" in row(output, "int8")
    assert "8.12" in row(output, "int8")
    # Not of the first step, which is dense: the steps that training is made of.
    assert row(output, "onebit_adam").split()[-2] == "1.02"


def test_sixty_columns_cut_no_name() -> None:
    with mock.patch.object(_catalogue, "_bits", return_value="0.125"):
        narrow = run_cli("schemes", columns=60)
    assert set(scheme_names()) <= set(narrow.split())
    table, _, _ = narrow.partition("\nBegin with")
    assert max(map(len, table.splitlines())) <= 60


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("advise --model lstm --schemes powersgd:rank=4", {"powersgd:rank=4", "speed-up"}),
        ("simulate --model lstm --schemes powersgd:rank=4", {"powersgd:rank=4", "exposed"}),
        ("simulate --list-networks", {"gb200-nvl72", "source"}),
        ("schemes", {"batched_powersgd", "biased"}),
        ("schemes powersgd", {"min_compression_rate", "meaning"}),
        ("tradeoff int8:rounding=nearest fp16", {"rounding=nearest", "error"}),
        ("check int8", {"(collectives)", "counterexample"}),
    ],
)
def test_a_narrow_terminal_gets_long_lines_rather_than_half_a_table(
    command: str, words: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {text: law for text, law in LAWS.items() if "(collectives)" in text}
    monkeypatch.setattr(conformance, "LAWS", few)
    monkeypatch.setattr(_catalogue, "_bits", lambda scheme: "0.125")
    for columns in (20, 40):
        output = run_cli(*command.split(), columns=columns)
        assert words <= set(output.replace("|", " ").split())
        assert "…" not in output


def test_schemes_says_which_options_a_scheme_has() -> None:
    output = run_cli("schemes", "powersgd", "int4", "onebit_adam")
    assert "powersgd: Sends each gradient matrix M (n x m) as two thin factors of rank r." in output
    assert row(output, "warm_start").split("│")[2].strip() == "bool"
    assert re.search(r"│ compressed +│ Scheme \| None +│", output)
    assert "2.0" in row(output, "min_compression_rate")
    assert "rotates blocks first; False: a few large entries cost" in row(output, "rotate")
    assert output.count("│ start_step ") == 3
    assert [line.split()[5] for line in output.splitlines() if " error_feedback " in line] == [
        *("True", "True", "False")
    ]


def test_schemes_says_what_a_scheme_sends() -> None:
    # A rank-4 scheme of 512 x 512 entries sends 4 x 1024 of 32 bits: half a bit an entry.
    output = run_cli("schemes", "powersgd", "int8", "noop")
    powersgd, int8, noop = (line for line in output.splitlines() if line.startswith("sends: "))
    assert powersgd.startswith(
        "sends: 2 x all_reduce per bucket; 0.5 bits per entry, where float32"
    )
    assert int8.startswith("sends: 1 x all_to_all, 1 x all_gather per bucket; 8.12 bits per entry")
    assert noop.strip() == "sends: nothing"


@pytest.mark.parametrize("name", [*BUILT_IN, *BASELINES])
def test_the_example_of_a_scheme_makes_it(name: str) -> None:
    text = inspect.getdoc(_registry.factory_of(name)) or ""
    options = _registry.options_of(_registry.factory_of(name)) or {}
    line = _catalogue._example(name, text, options, [], {})[0]
    called = re.fullmatch(r"hook = commhooks\.register\(ddp_model, (.*)\)", line)
    assert called, line
    assert isinstance(eval(f"make({called[1]})", {"make": make}), Scheme)


def test_the_release_says_what_runs_and_why() -> None:
    lines = run_cli("--version").splitlines()
    assert lines[0].startswith(f"commhooks {commhooks.__version__}, torch {torch.__version__}, ")
    assert lines[1] == f"on the CPU: kernels, instruction set {cpu.instruction_set()}"
    assert lines[2] in ("on CUDA: kernels", f"on CUDA: PyTorch fallback ({cuda.missing()})")
    with use_kernels("definition"):
        assert "on the CPU: PyTorch fallback (asked for)" in run_cli("--version")


@pytest.mark.parametrize("command", ["--version", "doctor", "new mine", "advise --model lstm"])
def test_an_instruction_set_that_is_not_there_is_a_usage_error(command: str) -> None:
    error = ValueError("COMMHOOKS_CPU is one of v3 here, got 'v9'")
    with mock.patch.object(cpu, "instruction_set", side_effect=error):
        assert str(error) in run_cli(*command.split(), code=2)


@pytest.mark.parametrize("command", ["--version", "doctor", "new mine", "advise --model lstm"])
def test_kernels_of_no_kind_are_a_usage_error_of_every_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_op, "_mode", "foo")
    output = run_cli(*command.split(), code=2)
    assert "COMMHOOKS_KERNELS is one of auto, definition, native, got 'foo'" in output
    assert not list(tmp_path.iterdir())


def test_kernels_of_no_kind_in_the_environment_are_a_usage_error() -> None:
    environment = os.environ | {"COMMHOOKS_KERNELS": "foo", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "commhooks", "schemes"],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "COMMHOOKS_KERNELS is one of auto, definition, native, got 'foo'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["schemes", "check", "tradeoff"])
def test_the_shell_completes_commands_schemes_and_files(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--install-completion" in run_cli("--help")
    monkeypatch.chdir(tmp_path)
    Path("fp_mine.py").touch()

    def completed(line: str) -> list[str]:
        variables = {"_COMMHOOKS_COMPLETE": "complete_bash", "COMP_WORDS": line}
        variables["COMP_CWORD"] = str(len(line.split()) - 1)
        done = CliRunner().invoke(app, [], prog_name="commhooks", env=variables)
        return done.output.split()

    assert completed(f"commhooks {command[:3]}") == [command]
    assert completed(f"commhooks {command} fp") == ["fp16", "fp8", "fp_mine.py"]


def test_a_tradeoff_is_printed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "made" / "here"
    output = run_cli("tradeoff", "int8", "fp16", "--out", out, "--full")
    # fp16 has twice the bits and less error; a dither has half the error of rounding at random.
    table = pd.read_csv(out / "tradeoff.csv")
    names = {"int8", "int8 rounding=stochastic", "int8 rounding=nearest", "fp16"}
    assert set(table.scheme) == names
    assert list(table.gradients.unique()) == ["normal", "Laplace", "t(3)"]
    normal = table[table.gradients == "normal"].set_index("scheme")
    # One tensor has one error; Adam's metric needs luck to be equal.
    assert (normal["median"] == normal.error).all()
    assert (normal.worst == normal.error).all()
    fronts = normal.fronts.fillna("")
    assert fronts["fp16"] == "error median worst adam"
    assert fronts["int8 rounding=stochastic"] == ""
    ratio = normal.error["int8 rounding=stochastic"] / normal.error["int8"]
    assert ratio == pytest.approx(2, rel=0.05)
    assert normal.bits["fp16"] == 16
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert table_of(output, "normal gradients, 4 ranks")["fp16"]["error"].endswith("*")


def table_of(output: str, title: str) -> dict[str, dict[str, str]]:
    """The rows of a printed table by scheme, with their cells by column."""
    _, _, below = output.partition(title)
    below, _, _ = below.partition("└")
    heads, rows = (
        [[cell.strip() for cell in line.split(bar)[1:-1]] for line in below.splitlines()]
        for bar in "┃│"
    )
    names = [" ".join(parts).strip() for parts in zip(*filter(None, heads), strict=True)]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows if row}


@pytest.mark.usefixtures("forget_new_schemes")
def test_a_scheme_of_a_file_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    run_cli("new", "mine", "--out", path)
    output = run_cli("tradeoff", path, "fp16", "--out", tmp_path)
    table = table_of(output, "normal gradients, 4 ranks")
    assert set(table) == {"mine (yours)", "fp16"}
    assert "Laplace" not in output
    assert "mine (yours)" in (tmp_path / "tradeoff.html").read_text()
    with mock.patch.object(_catalogue, "_bits", return_value="0"):
        _registry._factories.pop("mine")
        listed = [run_cli("schemes", path), run_cli("schemes")]
        yours, everything = (
            [line.split()[1] for line in o.splitlines() if "│ 0" in line] for o in listed
        )
    assert yours == ["mine"]
    assert "Begin with, by the network" not in listed[0]
    assert everything[:3] == ["none", "allreduce", "bf16"]
    assert (
        everything.index("int8")
        < everything.index("powersgd")
        < everything.index("topk")
        < everything.index("dgc")
    )


def test_every_point_of_the_picture_has_its_name() -> None:
    figures = {"median": 0.1, "worst": 0.1, "adam": 0.1, "noise": 0.0}
    places = {"first": (8.0, 0.1), "second": (8.0, 0.1), "lossy": (0.5, 0.99), "mine": (4.0, 0.3)}
    points = [
        Point(name, "normal", 4, bits, error, **figures) for name, (bits, error) in places.items()
    ]
    (panel,) = drawn(with_fronts(points), yours={"mine"}).subfigs[0].axes
    colours = {label.get_text(): label.get_color() for label in panel.texts}
    assert set(colours) == {"first, second", "lossy", "mine"}
    assert colours["mine"] == RED != colours["lossy"]


@pytest.mark.usefixtures("forget_new_schemes")
def test_a_file_is_compared_with_all_others_or_with_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "compared.py"
    run_cli("new", "compared", "--out", path)
    compared: list[str] = []
    monkeypatch.setattr(_commands, "cases_of", lambda of: compared.extend(of) or [])
    run_cli("tradeoff", path)
    assert {"compared", "int8", "powersgd"} <= set(compared)
    assert not {"dgc", "demo", "none", "noop"} & set(compared)
    compared.clear()
    monkeypatch.setattr(_registry, "_factories", dict(_registry._factories))
    del _registry._factories["compared"]
    run_cli("tradeoff", path, "int8", "compared")
    assert compared == ["int8", "compared"]


MIXED = """
from dataclasses import dataclass
from commhooks import Scheme, register_scheme
from commhooks.core import AllReduce, Result, Traits

class Base(Scheme):
    def exchange(self, bucket):
        mean = yield AllReduce(bucket.gradient.clone())
        return Result(mean)

@register_scheme("of_updates")
@dataclass(frozen=True)
class Updates(Base):
    traits = Traits(returns="update")

@register_scheme("of_means")
@dataclass(frozen=True)
class Means(Base):
    pass
"""


@pytest.mark.usefixtures("forget_new_schemes")
def test_a_scheme_of_updates_does_not_stop_the_others_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(MIXED)
    compared: list[str] = []
    monkeypatch.setattr(_commands, "cases_of", lambda of: compared.extend(of) or [])
    run_cli("tradeoff", path)
    assert "of_means" in compared
    assert "of_updates" not in compared
    assert "something else than an average" in run_cli("tradeoff", "of_updates", code=2)


def test_a_folder_that_cannot_be_made_is_named_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(_commands, "Course", mock.Mock(side_effect=AssertionError))
    folder = tmp_path / "file" / "folder"
    assert "Not a directory" in run_cli("tradeoff", "int8", "--out", folder, code=2)


def test_a_tradeoff_on_recorded_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_commands, "random_gradients", list)
    folder, out = tmp_path / "run", tmp_path / "out"
    for step in range(2):
        for rank in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            large, small = torch.randn(40, 30, generator=generator), torch.randn(9)
            write(folder, step, rank, {"large": large, "small": 1e-3 * small, "z": torch.zeros(9)})
    output = run_cli("tradeoff", "int8", "--trace", folder, "--ranks", "2", "--out", out)
    assert output.count("int8 rounding=nearest") == 1
    cells = table_of(output, "run gradients, 2 ranks")["int8"]
    assert list(cells) == [
        "scheme", "bits", "error", "median tensor", "worst tensor", "Adam's metric",
    ]  # fmt: skip
    figures = [float(cells[column].removesuffix("*")) for column in list(cells)[2:6]]
    # The step that counts, by the library.
    last = replay(Trace(folder, ranks=2), "int8", error_feedback=False).iloc[-1]
    expected = last[["error", "median", "worst", "adam"]].tolist()
    assert figures == pytest.approx(expected, rel=0.01)
    table = pd.read_csv(out / "tradeoff.csv")
    assert table[table.gradients == "run"].ranks.tolist() == [2, 2, 2]
    assert "run gradients, 2 ranks" in (out / "tradeoff.html").read_text()


def test_ranks_of_no_trace_are_refused() -> None:
    assert "--trace" in run_cli("tradeoff", "int8", "--ranks", 2, code=2)


def test_auto_is_no_name_for_a_scheme(tmp_path: Path) -> None:
    assert "'auto' is taken" in run_cli("new", "auto", "--out", tmp_path / "mine.py", code=2)


def test_a_trace_of_too_few_ranks_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, {"w": torch.ones(4)})
    text = run_cli("tradeoff", "int8", "--trace", tmp_path, "--ranks", "2", code=2)
    assert "1 ranks recorded" in text


def test_a_picture_without_matplotlib_is_named_and_the_table_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = run_cli("tradeoff", "fp16", "--out", tmp_path)
    assert "The picture needs matplotlib" in output
    assert [path.name for path in tmp_path.iterdir()] == ["tradeoff.csv"]


def test_without_its_packages_the_command_line_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "commhooks.cli._app")
    with pytest.raises(SystemExit, match=r"the command line needs rich and typer, .* pip install"):
        __main__.main()


@pytest.mark.usefixtures("forget_new_schemes")
def test_a_new_scheme_obeys_all_laws_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "my_scheme.py"
    run_cli("new", "my_scheme", "--out", path)
    assert len(path.read_text().splitlines()) < 50
    output = run_cli("check", path)
    assert output.count("passes") == sum(not law.claim for law in LAWS.values())
    assert "my_scheme" in scheme_names()


@pytest.mark.usefixtures("forget_new_schemes")
def test_check_names_the_law_that_is_broken_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {text: law for text, law in LAWS.items() if "finite" in text or "equal bits" in text}
    monkeypatch.setattr(conformance, "LAWS", few)
    path = tmp_path / "hides.py"
    run_cli("new", "hides", "--out", path)
    path.write_text(path.read_text().replace("gradient.abs()", "gradient.nan_to_num().abs()"))
    output = run_cli("check", path, code=1)
    (broken,) = (line for line in output.splitlines() if "fails" in line)
    assert "not finite" in broken
    assert "inf at 0" in broken


NEEDS_ROW = """
from dataclasses import dataclass
from commhooks.core import Biased, Codec, Traits, register_scheme
@register_scheme("needs_row")
@dataclass(frozen=True)
class NeedsRow(Codec):
    row: int
    traits = Traits(error=Biased())
    def encode(self, gradient, bucket):
        if self.row > 99:
            raise ArithmeticError("too large")
        return {"half": gradient / 2}
    def decode(self, payload, like, bucket):
        return payload["half"]
"""


@pytest.mark.usefixtures("forget_new_schemes")
@pytest.mark.parametrize("command", ["check", "tradeoff", "schemes", "simulate"])
def test_options_follow_a_file_as_they_follow_a_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "LAWS", dict(list(LAWS.items())[:1]))
    path = tmp_path / "needs.py"
    path.write_text(NEEDS_ROW)
    arguments = [f"{path}:row=64"]
    if command == "tradeoff":
        arguments += ["fp16"]
    if command == "simulate":
        arguments = ["--schemes", *arguments, "--model", "resnet50", "--ranks", "2"]
    output = run_cli(command, *arguments)
    assert re.search("needs_row[: ]row=64", output)


@pytest.mark.usefixtures("forget_new_schemes")
@pytest.mark.parametrize("command", ["tradeoff", "schemes", "simulate", "advise"])
def test_a_scheme_of_a_file_that_is_named_with_options_is_not_made_without(
    command: str, tmp_path: Path
) -> None:
    path = tmp_path / "needs.py"
    path.write_text(NEEDS_ROW)
    arguments = [str(path), "needs_row:row=64"]
    if command in ("simulate", "advise"):
        arguments = ["--schemes", ",".join(arguments), "--model", "resnet50", "--ranks", "2"]
    output = run_cli(command, *arguments)
    assert re.search("needs_row[: ]row=64|needs_row: ", output)
    if command == "schemes":
        assert 'register(ddp_model, "needs_row", row=64)' in output


def test_the_example_of_a_scheme_has_the_options_that_were_given() -> None:
    output = run_cli("schemes", "powersgd:rank=2:start_step=9")
    assert 'hook = commhooks.register(ddp_model, "powersgd", rank=2, start_step=9)' in output


@pytest.mark.usefixtures("forget_new_schemes")
def test_two_settings_of_a_file_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "needs.py"
    path.write_text(NEEDS_ROW)
    output = run_cli("tradeoff", f"{path}:row=32", f"{path}:row=64")
    assert re.search("needs_row[: ]row=32", output)
    assert re.search("needs_row[: ]row=64", output)


@pytest.mark.usefixtures("forget_new_schemes")
def test_a_missing_option_is_named_as_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "needs.py"
    path.write_text(NEEDS_ROW)
    assert "needs_row:row=..." in run_cli("check", path, code=2, columns=400)


@pytest.mark.usefixtures("forget_new_schemes")
def test_a_scheme_that_raises_is_checked_once_and_its_line_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "needs.py"
    path.write_text(NEEDS_ROW)
    output = run_cli("check", f"{path}:row=100", code=1, columns=400)
    assert output.count("fails") == 1
    assert "ArithmeticError: too large (needs.py:11 in encode; shapes (24, 20), " in output
    assert "All other checks need this to run" in output


def test_checks_that_are_not_for_a_scheme_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {text: law for text, law in LAWS.items() if "zeros are" in text or "exchanged" in text}
    monkeypatch.setattr(conformance, "LAWS", few)
    assert 'left out: 1 check of an average (returns="update")' in run_cli("check", "dgc")


SCHEME = """
from dataclasses import dataclass
from commhooks.schemes import Dense
from commhooks import register_scheme
@register_scheme("test_cli_scheme")
"""
FILES = {
    "syntax.py": (b"def (", "does not run: SyntaxError"),
    "bytes.py": (b"\x00\xff\x00", "does not run"),
    "raises.py": (b"x = 1\nraise KeyError('lost')", "does not run: line 2: KeyError: 'lost'"),
    "leaves.py": (b"import sys; sys.exit(0)", "does not run: line 1: SystemExit"),
    "empty.py": (b"", "registers no scheme"),
    "taken.py": (
        b"from commhooks import register_scheme, schemes\nregister_scheme('int8')(schemes.Dense)",
        "line 2: ValueError: register_scheme('int8'): the name is taken",
    ),
    "plain.py": (f"{SCHEME}class One(Dense):\n    bits: int = 3".encode(), "declares bits"),
    "needs.py": (
        f"{SCHEME}@dataclass(frozen=True)\nclass Two(Dense):\n    bits: int".encode(),
        "needs the options bits",
    ),
    "asserts.py": (
        f"{SCHEME}def make_it():\n    raise ArithmeticError('no luck')".encode(),
        "cannot be made: ArithmeticError: no luck",
    ),
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new", "int8"], "taken"),
        (["new", "Not A Name"], "small letters"),
        (["new", ""], "small letters"),
        (["new", "_"], "small letters"),
        (["new", "été"], "small letters"),
        (["new", "class"], "small letters"),
        (["new", "torch"], "would hide the module torch"),
        (["new", "mine", "--out", "nowhere/mine.py"], "nowhere/mine.py"),
        (["new", "mine", "--out", "mine.txt"], "ends in .py"),
        (["check", "nothing.py"], "no file nothing.py"),
        (["check", "noop"], "does not average"),
        (["check", "nope"], "no scheme 'nope'; did you mean 'noop'?"),
        (["check", ""], "no scheme ''"),
        (["check", "[red]\x00"], "no scheme '[red]"),
        (["schemes", "int9"], "did you mean 'int8'?"),
        (["schemes", "nothing.py"], "no file nothing.py"),
        (["tradeoff", "int9"], "did you mean 'int8'?"),
        (["tradeoff", "dgc"], "something else than an average"),
        (["tradeoff", "--trace", "nowhere"], "no file of recorded gradients there"),
        (["doctor", "who"], "unexpected extra argument"),
        (["nothing"], "No such command"),
        (["check", "int8", "--fast"], "No such option"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = run_cli(*arguments, code=2)
    assert words in output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forget_new_schemes")
@pytest.mark.parametrize("words", ["check", "schemes", "schemes int8", "tradeoff", "tradeoff int8"])
def test_a_file_that_registers_nothing_is_refused_by_every_command(
    words: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.py").touch()
    output = run_cli(*words.split(), tmp_path / "empty.py", code=2)
    assert "registers no scheme: see commhooks.register_scheme" in output


@pytest.mark.usefixtures("forget_new_schemes")
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_scheme_is_answered_by_a_sentence(name: str, tmp_path: Path) -> None:
    content, words = FILES[name]
    (tmp_path / name).write_bytes(content)
    output = run_cli("check", tmp_path / name, code=2)
    assert words in " ".join(output.replace("│", "").split())


@pytest.mark.usefixtures("forget_new_schemes")
@pytest.mark.parametrize("name", ["plain.py", "needs.py", "asserts.py"])
def test_a_scheme_that_cannot_be_made_does_not_spoil_the_listing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name][0])
    with mock.patch.object(_catalogue, "_bits", return_value="0"):
        listed = run_cli("schemes", tmp_path / name)
    assert "see commhooks schemes test_cli_scheme" in row(listed, "test_cli_scheme")
    described = run_cli("schemes", "test_cli_scheme", code=0 if name == "needs.py" else 2)
    assert FILES[name][1] in described or "needed" in row(described, "bits")
