"""Options as fields of dataclasses, whose annotations state the allowed values; and the options of a run.

    @dataclass(frozen=True, kw_only=True)
    class FedProx(Method):  # a Method is Checked
        mu: NonNegative = option(0.01, "Weight of the proximal term; 0 is FedAvg.")

    FedProx(mu=-1)  # InvalidValueError: mu must be greater than or equal to 0, got -1; mu: Weight of the proximal term; …

pydantic checks every value; only text is converted. Command-line flags, TOML files, Flower's run configuration and
`--set PATH=VALUE` are all derived from `options_of`.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.registry import load_object

if TYPE_CHECKING:
    import torch  # help texts need no torch

STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
"""How values are checked: nothing is converted, so "3" is not a number, and True is neither 1 nor 1.0."""

# Types of options with their ranges. All numbers are finite.
Count = Annotated[int, Field(ge=1)]
NonNegativeCount = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Ratio = Annotated[float, Field(gt=0, le=1, description="Share that is kept: to prune 30 %, pass 0.7.")]

T = TypeVar("T")


def option(default: T, description: str) -> T:
    """Return the default of a dataclass field that is an option.

    Args:
        default: The default of the field.
        description: Meaning of the option, for help texts. Its first sentence ends errors about the option.
    """
    field: Any = dataclasses.field(default=default, metadata={"description": description})
    return field  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Option:
    """One option: a field of a dataclass or a keyword of a function. `default` is MISSING if the option is required."""

    name: str
    hint: Any
    default: Any
    about: str = ""

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.hint, config=STRICT)

    def check(self, value: object, *, name: str | None = None) -> None:
        if value is self.default:
            return
        try:
            self._adapter.validate_python(value)
        except ValidationError as error:
            raise self._refusal(error, value, name=name) from None

    def read(self, value: object, *, name: str | None = None) -> Any:
        """Check a value and return it. Text is converted: "none" gives None, and commas separate the items of a tuple."""
        if not isinstance(value, str):
            self.check(value, name=name)
            return value
        refused = None
        for given in ([None] if value.lower() == "none" else []) + [value, tuple(part.strip() for part in value.split(","))]:
            try:
                return self._adapter.validate_python(given, strict=False)
            except ValidationError as error:
                refused = refused or error
        assert refused is not None
        raise self._refusal(refused, value, name=name)

    def _refusal(self, error: ValidationError, value: object, *, name: str | None) -> InvalidValueError:
        told = [one["msg"].removeprefix("Input should be ").partition(", unable")[0] for one in error.errors()]
        advice = f"; {self.name}: {re.split(r'(?<=[.]) ', self.about)[0].rstrip('.')}" if self.about else ""
        return InvalidValueError(f"{name or self.name} must be {' or '.join(told)}, got {value!r}{advice}")


def _described(hint: Any) -> str:
    """Return the outermost description in an annotation; empty if it has none."""
    own = [one.description for one in get_args(hint) if isinstance(one, FieldInfo) and one.description]
    return own[-1] if own else next(filter(None, map(_described, get_args(hint))), "")


def _is_limited(hint: Any) -> bool:
    return get_origin(hint) in (Annotated, Literal) or any(map(_is_limited, get_args(hint)))


class Checked:
    """Base class of dataclasses that check their fields on construction, also by `dataclasses.replace`.

    A field is checked if its annotation is bool, int, float or str, or has a range or a `Literal`. Its default is always
    allowed. Rules that involve several fields go into a `__post_init__` that calls this one first. The descriptions of options
    are appended to the docstring.

    Raises:
        InvalidValueError: a value that its annotation does not allow.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fields = {name: one.metadata for name, one in vars(cls).items() if isinstance(one, dataclasses.Field)}
        told = [f"{name}: {one['description']}" for name, one in fields.items() if "description" in one]
        if told:
            lines = [textwrap.fill(one, 96, initial_indent=" " * 4, subsequent_indent=" " * 8) for one in told]
            cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Args:", *lines])

    def __post_init__(self) -> None:
        kind: Any = type(self)  # Any, since mypy does not accept a type as a hashable argument
        for one in _limited_options(kind):
            one.check(getattr(self, one.name))


@cache
def _limited_options(owner: type) -> list[Option]:
    return [one for one in options_of(owner).values() if one.hint in (bool, int, float, str) or _is_limited(one.hint)]


@cache
def options_of(owner: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a dataclass or of a function, by name and in their order.

    The options of a function are its keyword-only arguments; without an annotation, an option has the type of its default. A
    description comes from the field, or else from the annotation: `Annotated[int, Field(ge=1, description="…")]`.
    """
    hints, texts = get_type_hints(owner, include_extras=True), dict[str, str]()
    if isinstance(owner, type):
        assert dataclasses.is_dataclass(owner)
        defaults = {one.name: one.default for one in dataclasses.fields(owner) if one.init and one.name[0] != "_"}
        # A subclass that changes only a default keeps the description.
        above = [one for base in reversed(owner.__mro__) for one in getattr(base, "__dataclass_fields__", {}).values()]
        texts = {one.name: one.metadata["description"] for one in above if "description" in one.metadata}
    else:
        keywords = [one for one in inspect.signature(owner).parameters.values() if one.kind is one.KEYWORD_ONLY]
        defaults = {one.name: MISSING if one.default is one.empty else one.default for one in keywords}
    found = {}
    for name, default in defaults.items():
        hint = hints.get(name, Any if default in (None, MISSING) else type(default))
        found[name] = Option(name, hint, default, texts.get(name) or _described(hint))
    return found


def read_keywords(
    owner: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    name: str,
    prefix: str = "",
    without: Collection[str] = (),
    advice: str = "",
) -> dict[str, Any]:
    """Check keywords for a function or a dataclass, and return them. Text is converted as the annotation says.

    In errors, `name` names the owner, `prefix` comes before a keyword, and `advice` follows an unknown one. Keywords in
    `without` are not options.
    """
    known = {key: option for key, option in options_of(owner).items() if key not in without}
    for key in given:
        if key not in known:
            raise UnknownNameError(f"{name} has no option {key!r}; {nearest(key, known)}{advice}")
    return {key: known[key].read(value, name=prefix + key) for key, value in given.items()}


def read_settings(texts: Iterable[str]) -> dict[str, str]:
    """Read `PATH=VALUE` texts; raise InvalidValueError if a text has another form, or repeats a path."""
    found: dict[str, str] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", path.strip()):
            raise InvalidValueError(f"--set must be PATH=VALUE, as in training.momentum=0.5, got {text!r}")
        if path.strip() in found:
            raise InvalidValueError(f"--set names {path.strip()} twice; give it once")
        found[path.strip()] = value.strip()
    return found


HETEROGENEITY: Mapping[str, tuple[float, ...]] = {
    "low": (1.0, 1 / 2),
    "median": (1.0, 1 / 2, 1 / 4),
    "high": (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16),
}
"""Level of system heterogeneity → capabilities, from which those of clients are drawn uniformly.

Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Effect of Heterogeneity (Q3); "high" is also used in its Table I.
"""

Amp = Literal["off", "bfloat16"]
Upload = Literal["float32", "bfloat16"]
CapabilityOf = Literal["flops", "units", "memory"]
Deploy = Literal["last", "best"]
Factor = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]

_SGD: Mapping[str, float] = {"lr": 0.1, "weight_decay": 0.0}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
    """Set how each client trains in a round.

    Pass it as `RunConfig(training=...)`. A client starts each round with a fresh optimizer, makes
    `local_epochs` passes over its training data, and sends the changes of its weights to the server.

    Raises:
        InvalidValueError: a value that is not allowed.
        UnknownNameError: torch has no such optimizer. It is looked up if a default depends on it.

    Example:
        >>> import sparsekit_fl as fl
        >>> training = fl.TrainingConfig(local_epochs=1, optimizer="adamw")
        >>> training.lr, training.batch_size
        (0.001, 20)
    """

    local_epochs: Count = option(
        5,
        "Passes over a client's training data per round. More passes train longer between two averages, and let the "
        "clients drift further apart. Default: 5.",
    )
    batch_size: Count = option(20, "Examples per step. The last batch of a pass may be smaller. Default: 20.")
    # __post_init__ replaces None by a number, here and for weight_decay.
    lr: NonNegative = option(  # type: ignore[assignment]
        None,
        "Learning rate of the first round. The option lr_decay lowers it over the rounds. Default: 0.1 for SGD, the "
        "default of torch for another optimizer.",
    )
    momentum: Momentum = option(0.0, "Momentum of SGD and RMSprop, in [0, 1). Other optimizers refuse it. Default: 0.")
    weight_decay: NonNegative = option(  # type: ignore[assignment]
        None, "Weight decay of the optimizer. Default: 0 for SGD, the default of torch for another optimizer."
    )
    clip: Positive | None = option(
        None,
        "Largest norm of the gradient in a step. A larger gradient is scaled down to it. None does not clip. Default: None.",
    )
    optimizer: str = option(
        "sgd",
        "Optimizer of each client: sgd, adam, adamw, another of torch.optim, or package.module:Class. Its state is "
        "dropped after each round. Default: sgd.",
    )
    amp: Amp = option(
        "off", "Data type of forward passes: off (float32) or bfloat16. Weights, updates and scores stay float32. Default: off."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        absent = [name for name in _SGD if getattr(self, name) is None]
        # A few optimizers accept a tensor as the learning rate, but no default is a tensor.
        own = inspect.signature(optimizer_class(self.optimizer)).parameters if absent and self.optimizer != "sgd" else {}
        for name in absent:
            object.__setattr__(self, name, float(own[name].default) if name in own else _SGD[name])

    @cached_property
    def is_plain(self) -> bool:
        """Whether a step is θ ← θ − lr · gradient and nothing else."""
        return self.optimizer == "sgd" and not any((self.momentum, self.weight_decay, self.clip))


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """Set the number of rounds, the clients of each round, their training and their scores.

    Pass it to `fl.run(method, problem, clients, config)`. Method, model, data and configuration
    determine every number of a result; the engine and the number of workers affect only the speed.

    Raises:
        InvalidValueError: a value, or a combination of values, that is not allowed.

    Example:
        >>> import sparsekit_fl as fl
        >>> config = fl.RunConfig(rounds=100, cohort=10, training=fl.TrainingConfig(lr=0.05))
        >>> config.eval_every, config.needed_replies(cohort=10)
        (10, 5)
    """

    rounds: Count = field(
        metadata={"description": "Number of rounds. In each, some clients train, and the server combines their updates."}
    )
    cohort: Count = option(10, "Clients per round. It must not exceed the number of clients. Default: 10.")
    training: TrainingConfig = field(
        default_factory=TrainingConfig,
        metadata={"description": "How each client trains. Default: `TrainingConfig()`, 5 local epochs of SGD."},
    )
    seed: NonNegativeCount = option(
        0, "Seed of all random numbers. Equal seeds give equal results on every engine. Default: 0."
    )
    eval_every: Count | None = option(
        None,
        "Rounds between two scores of the personal models. They are also scored after the last round. Default: a tenth of "
        "all rounds, but at most 10.",
    )
    eval_global_every: Count | None = option(
        None,
        "Rounds between two scores of the global model. It is also scored after the last round. None scores it after the "
        "last round only. Default: None.",
    )
    eval_clients: Count | None = option(
        None,
        "Clients scored before the last round, drawn again each time. Fewer make scores faster and noisier. None "
        "scores all every time. Default: None.",
    )
    final_clients: Count | None = option(
        None, "Clients scored after the last round. None scores all, which takes long for 100,000 clients. Default: None."
    )
    device: str = option(
        "cpu",
        "Device that clients train on: cpu, cuda, cuda:0 or mps. Separate several by commas; workers share them. Default: cpu.",
    )
    deterministic: bool = option(
        False,
        "Make runs on a GPU repeatable bit by bit, with slower operators and without TF32. Runs on the CPU always are. "
        "Default: false.",
    )
    capability_of: CapabilityOf = option(
        "flops",
        "Unit of capabilities and ratios. flops: shares of the FLOPs of a step of the whole model; "
        "every layer keeps the largest equal share of its units that fits, so that a device of capability 1/4, at a "
        "quarter of the speed, needs as long as a full one. units: the units of each layer, as HeteroFL, FedRolex and "
        "FjORD define it. A quarter of the units costs about a sixteenth of the FLOPs. "
        "memory: the entries that train, each of which needs room for its value, its gradient and the state of the "
        "optimizer, as for the ranks of adapters, which hardly change the FLOPs. Default: flops.",
    )
    capability_levels: tuple[Factor, ...] | None = option(
        None,
        "Capabilities to draw from, each in (0, 1]. Every level is equally likely. None keeps each client's own "
        "capability. Default: None.",
    )
    too_small: Literal["note", "skip"] = option(
        "note",
        "What to do with a device that cannot afford even the smallest submodel, one unit of each group. note: it trains "
        "that submodel, and the result has a note; skip: it gets no task. Default: note.",
    )
    redraw_capability: bool = option(
        False, "Draw the capability of each client in every round, instead of once. Default: false."
    )
    deploy: Deploy = option(
        "last",
        "Model that each client is scored with. last: the model that the method deploys after the last round, such as the "
        "global model of FedAvg, or the newest submodel of FedLPS. best: the model with the best score on the client's own "
        "validation data among this model, this model after one more local training, the newest average alone, and the "
        "model that the client trained last. No device gets a model that it cannot run. Default: last.",
    )
    lr_decay: Factor = option(1.0, "Factor on the learning rate after each round, in (0, 1]. Default: 1.")
    min_replies: Count | None = option(
        None,
        "Valid updates that a round needs. With fewer, the run stops, and a resumed run repeats the round. None takes "
        "half of the cohort, rounded up. Default: None.",
    )
    upload: Upload = option(
        "float32",
        "Data type of updates: float32, or bfloat16, which halves the bytes sent up and rounds the changes. Default: float32.",
    )

    def __post_init__(self) -> None:
        if isinstance(self.capability_levels, list):
            object.__setattr__(self, "capability_levels", tuple(self.capability_levels))
        super().__post_init__()
        if self.eval_every is None:
            object.__setattr__(self, "eval_every", max(1, min(10, self.rounds // 10)))
        if not isinstance(self.training, TrainingConfig):
            raise InvalidValueError(f"training must be a TrainingConfig, got {type(self.training).__name__}")
        if self.min_replies is not None and self.min_replies > self.cohort:
            raise InvalidValueError(f"min_replies must be at most cohort ({self.cohort}), got {self.min_replies}")

    def training_in(self, round: int) -> TrainingConfig:
        """Return the training options of a round, with its decayed learning rate. Round 0 has the options of round 1."""
        factor = self.lr_decay ** max(round - 1, 0)
        return self.training if factor == 1.0 else replace(self.training, lr=self.training.lr * factor)

    def needed_replies(self, cohort: int) -> int:
        """Return the number of valid updates that a round of `cohort` clients needs to count."""
        return -(-cohort // 2) if self.min_replies is None else min(self.min_replies, cohort)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` is the inverse."""
        return dict(TypeAdapter(RunConfig).dump_python(self, mode="json"))

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "RunConfig":
        """Restore a configuration from the output of `to_dict`; raises ValueError for other values."""
        return TypeAdapter(RunConfig).validate_python(raw)


def optimizer_class(name: str) -> "type[torch.optim.Optimizer]":
    """Return an optimizer class by its name in `torch.optim`, ignoring case, or by `package.module:Class`."""
    import torch

    base, kinds = torch.optim.Optimizer, {key: kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
    known = {key.lower(): kind for key, kind in kinds.items() if issubclass(kind, base) and kind is not base}
    found = load_object(name) if ":" in name else known.get(name.lower())
    if found is None:
        raise UnknownNameError(f"unknown optimizer {name!r}; {nearest(name.lower(), known)}, or package.module:Class")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InvalidValueError(f"optimizer {name!r} must be a class that inherits torch.optim.Optimizer, got {found!r}")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is not None:
        raise InvalidValueError(f"optimizer {name!r} needs a closure that computes the loss again; choose another")
    return found
