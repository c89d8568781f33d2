"""Defines ``PerParameter``, which chooses a scheme for each parameter by name, shape or dtype."""

from __future__ import annotations

import difflib
import fnmatch
import re
import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._names import parameter_name
from commhooks.core._scheme import Scheme, checked_result, walk
from commhooks.core._settings import check_settings, shown
from commhooks.core._slot import Slot
from commhooks.core._traits import Traits
from commhooks.core._user_line import user_stacklevel
from commhooks.wrappers._base import Choice
from commhooks.wrappers._feedback import keeps_residual, with_flush
from commhooks.wrappers._parts import exchange_concurrently, join_parts, parts_of
from ddp_core.exchange._errors import listed

__all__ = ["ROLES", "PerParameter", "Rule", "role_of", "warn_of_idle_rules"]


ROLES = ("embedding", "head", "norm", "bias", "matrix", "vector")


def role_of(name: str, shape: Sequence[int]) -> str:
    """Returns the role of a parameter, by the words in its name and by its shape.

    "embedding": embed, embedding, wte, wpe or tok; "head": head, lm_head, classifier or unembed;
    "norm" (one dimension): norm, ln or bn, also numbered; "bias"; otherwise "matrix" or "vector".

    Example:
        >>> role_of("layers.0.norm1.weight", (128,))
        'norm'
    """
    words = {word.rstrip("0123456789") for word in re.split(r"[._]", name.lower())}
    if words & {"embed", "embedding", "embeddings", "wte", "wpe", "tok"}:
        return "embedding"
    if words & {"head", "lmhead", "classifier", "unembed"}:
        return "head" if len(shape) > 1 else "bias"
    if len(shape) <= 1 and words & {"norm", "ln", "bn", "layernorm", "batchnorm", "rmsnorm"}:
        return "norm"
    if "bias" in words:
        return "bias"
    return "matrix" if len(shape) > 1 else "vector"


@dataclass(frozen=True)
class Rule:
    """Names the scheme of all parameters that meet some conditions; all of them must hold.

    Args:
        scheme: the scheme for these parameters.
        name: shell-style pattern of the parameter's name, e.g. ``"*.bias"`` or ``"embed*"``.
        role: the parameter's role, see :func:`role_of`.
        min_dim, max_dim: bounds on the number of dimensions.
        min_numel, max_numel: bounds on the number of entries.
        dtype: the gradient's dtype.
    """

    scheme: Scheme
    name: str = "*"
    role: str | None = None
    min_dim: int = 0
    max_dim: int = 1 << 30
    min_numel: int = 0
    max_numel: int = 1 << 62
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.role is not None and self.role not in ROLES:
            raise ValueError(f"Rule(role=...) is one of {', '.join(ROLES)}, got {self.role!r}")
        for least, most in (("min_dim", "max_dim"), ("min_numel", "max_numel")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(
                    f"Rule({least}=..., {most}=...): no parameter is between "
                    f"{getattr(self, least)} and {getattr(self, most)}"
                )

    def matches(self, name: str, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether a parameter, or a rank's shard of it (FSDP2), meets all conditions."""
        name = parameter_name(name)
        return (
            fnmatch.fnmatchcase(name, self.name)
            and self.min_dim <= len(shape) <= self.max_dim
            and self.min_numel <= shape.numel() <= self.max_numel
            and self.role in (None, role_of(name, shape))
            and self.dtype in (None, dtype)
        )


@dataclass(frozen=True)
class PerParameter(Choice):
    """Chooses a scheme for each parameter: that of the first rule that matches, else ``default``.

    The chosen schemes run concurrently; their all-reduces of equal operation and dtype are merged
    into one message.

    A rule that names parameters, roles or dtypes which the model does not have warns when a hook is
    made for the model.

    Args:
        rules: rules in order of precedence.
        default: the scheme for parameters that no rule matches.

    Example:
        >>> PerParameter([Rule(Dense(), name="*embed*"), Rule(Dense(), max_dim=1)],
        ...              default=ErrorFeedback(PowerSGD(rank=4)))
    """

    rules: Sequence[Rule]
    default: Scheme

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Iterable):
            raise TypeError(f"PerParameter(rules=...) is a list of Rule, got {shown(self.rules)}")
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"PerParameter(rules=...) holds Rule objects, got {shown(rule)}")
        # A cache by name, shape and dtype: every step looks up hundreds of parameters per bucket.
        object.__setattr__(self, "_index_of", {})

    @property
    def schemes(self) -> list[Scheme]:
        """Returns all different schemes to choose from, in order of precedence."""
        return list(dict.fromkeys([*(rule.scheme for rule in self.rules), self.default]))

    @property
    def traits(self) -> Traits:
        # The sum over schemes: collectives that cannot be merged run one after the other.
        rounds = sum(scheme.traits.rounds for scheme in self.schemes)
        return super().traits._replace(rounds=rounds)

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        which = self.choose(name, shape, dtype)
        return which, self.schemes[which].bucket_group(name, shape, dtype)

    def begins_with(
        self, name: str, shape: torch.Size, dtype: torch.dtype, step: int
    ) -> tuple[Slot, ...]:
        chosen = self.schemes[self.choose(name, shape, dtype)]
        return chosen.begins_with(name, shape, dtype, step)

    def choose(self, name: str, shape: torch.Size, dtype: torch.dtype) -> int:
        """Returns the index in ``schemes`` of the scheme for a parameter."""
        chosen: dict[Hashable, int] = self._index_of  # type: ignore[attr-defined]
        if (name, shape, dtype) not in chosen:
            matching = (rule.scheme for rule in self.rules if rule.matches(name, shape, dtype))
            chosen[name, shape, dtype] = self.schemes.index(next(matching, self.default))
        return chosen[name, shape, dtype]

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        layout = bucket.layout
        chosen: dict[int, list[int]] = {}
        for position, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
            which = self.choose(name, shape, bucket.output.dtype)
            chosen.setdefault(which, []).append(position)
        schemes = self.schemes
        # After a switch or a loaded state, a parameter may have the residual of another scheme: a
        # scheme without error feedback sends it.
        if keeps_residual(self):
            schemes = [with_flush(scheme) for scheme in schemes]
        if len(chosen) == 1:  # the usual case with ``layout="scheme"``: nothing is copied
            (which,) = chosen
            result = yield from schemes[which].exchange(bucket)
            return checked_result(schemes[which], result)
        parts = parts_of(bucket, [(schemes[which], chosen[which]) for which in sorted(chosen)])
        yield from exchange_concurrently(parts)
        return join_parts(parts, bucket)


def warn_of_idle_rules(
    scheme: Scheme, parameters: Iterable[tuple[str, torch.Size, torch.dtype, Any]]
) -> None:
    """Warns of rules that match no parameter of the model, by name, role or dtype.

    Rules by size or number of dimensions alone suit any model, and never warn.

    Args:
        scheme: the scheme whose rules are checked, and those of schemes inside.
        parameters: name, shape and dtype of each parameter; further items are ignored.
    """
    known = [parameter[:3] for parameter in parameters]
    for nested in walk(scheme) if known else ():
        if not isinstance(nested, PerParameter):
            continue
        remaining = known
        for rule in nested.rules:
            unmatched = [parameter for parameter in remaining if not rule.matches(*parameter)]
            if len(unmatched) == len(remaining) and (rule.name != "*" or rule.role or rule.dtype):
                is_shadowed = any(rule.matches(*parameter) for parameter in known)
                names = list(dict.fromkeys(parameter_name(name) for name, _, _ in known))
                warnings.warn(_idle_warning(rule, names, is_shadowed), stacklevel=user_stacklevel())
            remaining = unmatched


def _idle_warning(rule: Rule, names: Sequence[str], is_shadowed: bool) -> str:
    """Returns the warning for a rule that is never used; ``is_shadowed``: by earlier rules."""
    conditions = [
        f"{setting.name}={getattr(rule, setting.name)!r}"
        for setting in fields(rule)
        if setting.name != "scheme" and getattr(rule, setting.name) != setting.default
    ]
    which = f"PerParameter: Rule({', '.join(conditions)})"
    if is_shadowed:
        return f"{which} is never used: earlier rules take all parameters that it matches"
    near = difflib.get_close_matches(rule.name.strip("*"), names, n=3, cutoff=0.4)
    choices = f"the nearest are {', '.join(near)}" if near else f"it has {listed(names)}"
    return f"{which} matches none of the model's {len(names)} parameters; {choices}"
