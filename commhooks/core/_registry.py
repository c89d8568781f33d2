"""Registers schemes by name, and builds them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_dataclass, checked, shown
from commhooks.errors import OptionError, SchemeError, UnknownSchemeError

__all__ = [
    "BASELINES",
    "build",
    "check_known",
    "factory_of",
    "import_of_class",
    "options_of",
    "register_scheme",
    "scheme_names",
]

Factory = Callable[..., Scheme]
F = TypeVar("F", bound=Factory)

_factories: dict[str, Factory] = {}

# Names and classes of the schemes that ``import commhooks.research.baselines`` registers: known
# here, so that a name or a saved state that comes before the import says what to do.
BASELINES = {
    "aligned_topk": "AlignedTopK",
    "global_qsgd": "GlobalQSGD",
    "intsgd": "IntSGD",
    "qsgd": "QSGD",
    "random_block": "RandomBlock",
    "terngrad": "TernGrad",
}
_IMPORT = "import commhooks.research.baselines"

# Names that users try for the uncompressed all-reduce.
_UNCOMPRESSED = {"dense", "disabled", "false", "float32", "fp32", "identity", "off", "uncompressed"}
# Schemes by number of bits, which is no option.
_BY_BITS = {"1": "onebit", "4": "int4", "8": "int8", "16": "bf16"}

# Names of options in other libraries, torch's hooks above all, and what replaces each here.
_ELSEWHERE = {
    "verify_every": "it is called verify in register(..., verify=...)",
    "verification": "it is called verify in register(..., verify=...)",
    "replicate_group": "it is an argument of register(..., replicate_group=...), for FSDP2",
    "between": "it is called replicate_group in register(..., replicate_group=...), for FSDP2",
    "max_error": "it is an option of register(model, 'auto', max_error=...)",
    "matrix_approximation_rank": "it is called rank here",
    "start_powerSGD_iter": "it is called start_step here",
    "start_iter": "it is called start_step here",
    "use_error_feedback": "it is called error_feedback here",
    "bucket_size": "entries per scale are called block or block_size here",
    "random_seed": "the seed is an argument of register(..., seed=...)",
    "seed": "the seed is an argument of register(..., seed=...) and of HookState",
    "process_group": "the process group is an argument of register(..., process_group=...)",
    "layout": "the layout is an argument of register(..., layout=...)",
    "history": "the history is an argument of HookState(..., history=...)",
    "orthogonalization_epsilon": "none is needed: dead rows are replaced, see PowerSGD",
    "compression_stats_logging_frequency": "what was sent is in hook.report()",
    "batch_tensors_with_same_shape": "all matrices of a bucket are computed together",
}


def register_scheme(*scheme_names: str) -> Callable[[F], F]:
    """Makes a scheme class, or a function that returns a scheme, available by name.

    From then on, the arguments of a function are checked against their annotations.

    Raises:
        ValueError: no name was given, or a name is taken.
        TypeError: a name is no string, or the decorated object makes no scheme.

    Example:
        >>> @register_scheme("first_bit")
        ... @dataclass(frozen=True)
        ... class FirstBit(Codec): ...
        >>> "first_bit" in scheme_names()
        True
    """
    if not scheme_names:
        raise ValueError('register_scheme(name): one name at least, @register_scheme("my_scheme")')
    for name in scheme_names:
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            raise TypeError(
                f'register_scheme(name) takes names, @register_scheme("my_scheme"), '
                f"got {shown(name)}"
            )

    def decorate(factory: F) -> F:
        is_class = isinstance(factory, type)
        if not callable(factory) or (is_class and not issubclass(factory, Scheme)):  # type: ignore[arg-type]
            raise TypeError(
                f"register_scheme({scheme_names[0]!r}): a class derived from Scheme or Codec, or a "
                f"function that returns a scheme, got {shown(factory)}"
            )
        for name in scheme_names:
            if name in _factories:
                raise ValueError(
                    f"register_scheme({name!r}): the name is taken by {_factories[name]}"
                )
        # The fields of a class are checked by ``Scheme`` itself.
        registered: Any = factory if is_class else checked(factory)
        for name in scheme_names:
            _factories[name] = registered
        decorated: F = registered
        return decorated

    return decorate


def scheme_names() -> list[str]:
    """Returns the names of all registered schemes, sorted."""
    return sorted(_factories)


def factory_of(name: str) -> Factory:
    """Returns the class or function registered under a name.

    Raises:
        UnknownSchemeError: no scheme has that name; the message suggests the nearest.
    """
    factory = _factories.get(name)
    if name == "auto":
        raise UnknownSchemeError(
            "'auto' is no scheme by itself: it measures a model and chooses one of the schemes, in "
            "commhooks.register(model, 'auto')"
        )
    if factory is None:
        if name.lower() in BASELINES:
            raise UnknownSchemeError(
                f"no scheme {name.lower()!r} is registered yet; `{_IMPORT}` registers it, with the "
                f"others that papers compare with. Registered: {', '.join(scheme_names())}"
            )
        hint = _nearest(name.lower(), scheme_names())
        if ":" in name or "=" in name:
            hint = '; options are arguments of the call, as in "powersgd", rank=2.'
        if name.lower() in _UNCOMPRESSED:
            hint = "; 'none' is the float32 all-reduce."
        raise UnknownSchemeError(
            f"no scheme {name!r}{hint} Registered: {', '.join(scheme_names())}. A scheme of your "
            f"own has to be imported first, on every rank"
        )
    return factory


def import_of_class(name: str) -> str | None:
    """Returns the import that defines a class such as "commhooks.QSGD"; None: it is no baseline."""
    return _IMPORT if name in {f"commhooks.{kind}" for kind in BASELINES.values()} else None


def options_of(factory: Factory) -> dict[str, Any] | None:
    """Returns the defaults of a factory's options by name; None if it takes any option.

    An option without a default has ``inspect.Parameter.empty``.
    """
    if isinstance(factory, type):
        check_dataclass(factory)
        defaults = {}
        for setting in fields(factory):
            if setting.init:
                lazy = setting.default_factory
                defaults[setting.name] = (
                    setting.default
                    if setting.default is not MISSING
                    else inspect.Parameter.empty
                    if lazy is MISSING
                    else lazy()
                )
        return defaults
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is not parameter.POSITIONAL_ONLY  # options are given by name
    }


def build(name: str, options: Mapping[str, Any], *, wrapper_options: Sequence[str] = ()) -> Scheme:
    """Builds the scheme registered under a name with ``options``.

    Args:
        name: a registered name.
        options: by name.
        wrapper_options: names of further options, which error messages list, too.

    Raises:
        UnknownSchemeError: no scheme has that name; the message suggests the nearest.
        OptionError: the scheme has no such option, or does not take its value.
        SchemeError: the registered function returned no scheme.
    """
    factory = factory_of(name)
    known = options_of(factory)
    if known is not None:
        every = [*known, *wrapper_options]
        scheme_of_bits = _BY_BITS.get(str(options.get("bits")))
        if "bits" not in every and scheme_of_bits not in (None, name):
            raise OptionError(
                f"scheme {name!r} has no option 'bits': {scheme_of_bits!r} is a scheme of its own. "
                f"Options: {', '.join(every)}"
            )
        check_known(f"scheme {name!r}", options, every)
        empty = inspect.Parameter.empty
        missing = [key for key, value in known.items() if value is empty and key not in options]
        if missing:
            given = [f"{key}=..." for key in missing]
            raise OptionError(
                f"scheme {name!r} needs the options {', '.join(missing)}: "
                f"make({name!r}, {', '.join(given)}); on the command line they follow a name or "
                f"file, {name}:{':'.join(given)}"
            )
    if isinstance(factory, type):
        built = factory(**options)
    else:
        try:
            built = factory(**options)
        except UnknownSchemeError:  # of a scheme inside, by its own name; is a ValueError, too
            raise
        except (TypeError, ValueError) as error:
            # The message names the class that the function made: add the name that was asked for.
            raise OptionError(f"scheme {name!r}: {error}") from error
    if not isinstance(built, Scheme):
        raise SchemeError(f"scheme {name!r}: its function returns a Scheme, got {shown(built)}")
    return built


def check_known(owner: str, options: Iterable[str], every: Sequence[str]) -> None:
    """Raises OptionError unless all ``options`` of ``owner`` are among ``every``."""
    for option in options:
        if option not in every:
            raise OptionError(
                f"{owner} has no option {option!r}{_hint(option, every)} "
                f"Options: {', '.join(every)}"
            )


def _hint(option: str, every: Sequence[str]) -> str:
    """Returns a suggestion in place of an unknown option, as the end of a sentence."""
    if option in _ELSEWHERE:
        return f"; {_ELSEWHERE[option]}."
    if option == "stochastic" and "rounding" in every:
        return "; it is called rounding here, such as 'stochastic' or 'nearest'."
    if option == "rounding" and "stochastic" in every:
        return "; it is called stochastic here: True or False."
    return _nearest(option, every)


def _nearest(word: str, every: Sequence[str]) -> str:
    # A cutoff below difflib's 0.6: a suggestion that is wrong costs a reader little.
    near = difflib.get_close_matches(word, every, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "."
