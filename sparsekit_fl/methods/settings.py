"""Settings: every option of every method by a path such as `local.proximal`, read, listed and replaced.

A path without a dot is an argument of the method's own function, as in `layers` of fedper. A path with dots begins with the
kind of a policy and goes on with fields of dataclasses, as in `local.term.target`; the kind alone names another policy, as in
`personal=LocalModel`.
"""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, get_args, get_type_hints

from sparsekit.criteria import Criterion
from sparsekit.criteria import registry as criteria
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl import policies
from sparsekit_fl.methods.method import KINDS, Method
from sparsekit_fl.options import Option, annotation_of, described, parse_value
from sparsekit_fl.policies.context import Policy


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One option of a method.

    Args:
        path: As in `--set PATH=VALUE`.
        value: What the method takes where nothing is set.
        allowed: What it may be, in words; empty where the annotation says nothing.
        about: What it means.
        owner: The class or function that has it.
        source: Where that was published; empty where it does not say.
    """

    path: str
    value: Any
    allowed: str
    about: str
    owner: str
    source: str = ""


def settings_of(method: Method) -> list[Setting]:
    """Return the options of all policies of a method, in the order of its fields."""
    return [setting for kind, policy in method.policies().items() for setting in _settings(policy, kind, method.source)]


def arguments_of(make: Callable[..., Any]) -> list[Setting]:
    """Return the arguments of a method's function; none where it is no function."""
    if not inspect.isroutine(make):
        return []
    texts, hints = _arguments(inspect.getdoc(make) or ""), get_type_hints(make, include_extras=True)
    given = {one.name: one.default for one in inspect.signature(make).parameters.values() if one.default is not one.empty}
    return [
        Setting(
            path=name, value=value, allowed=_allowed(hints.get(name)), about=texts.get(name, ""), owner=f"{make.__name__}()"
        )
        for name, value in given.items()
    ]


def with_arguments(make: Callable[..., Any], given: Mapping[str, Any], *, name: str) -> Any:
    """Call a method's function with some of its arguments.

    Args:
        make: The function.
        given: Argument → value; text is read by the annotation.
        name: Name of the method, for messages.

    Raises:
        UnknownNameError: it has no such argument.
        InvalidValueError: a value is not allowed.
    """
    if not given:
        return make()
    known = [setting.path for setting in arguments_of(make)]
    for path in given:
        if path not in known:
            made = make()
            paths = [*known, *(setting.path for setting in (settings_of(made) if isinstance(made, Method) else ()))]
            options = {one.rpartition(".")[2]: one for one in reversed(paths)}
            close = difflib.get_close_matches(path, options, n=1)
            meant = f"did you mean {options[close[0]]!r}?" if close else f"{nearest(path, [*known, *KINDS])};"
            raise UnknownNameError(f"method {name!r} has no argument {path!r}; {meant} {_where(name)}")
    hints = get_type_hints(make, include_extras=True)
    return make(**{path: _value(hints.get(path), value, path) for path, value in given.items()})


def with_settings(method: Method, given: Mapping[str, Any]) -> Method:
    """Return a method with other options.

    Args:
        method: The method.
        given: Path → value, as `settings_of` lists them; text is read by the annotation. A kind of policy alone takes the name
            of a class of `sparsekit_fl.policies`, or `package.module:Class`, made with its defaults; options of that class may
            follow under the same kind. Where several policies have an option of one name and value, as `local.alpha` and
            `aggregate.alpha` of depthfl, the path of one sets all that are not given.

    Raises:
        UnknownNameError: no such option or policy; names the nearest.
        InvalidValueError: a value is not allowed.
    """
    for path in sorted(given, key=lambda path: path.count(".")):
        kind, _, rest = path.partition(".")
        if kind not in KINDS:
            raise _unknown(method, path)
        if not rest:
            method = dataclasses.replace(method, **{kind: _policy(given[path], kind)})
            continue
        values = {setting.path: setting.value for setting in settings_of(method)}
        for other in KINDS:
            its = f"{other}.{rest}"
            # One number in two policies, such as the α of a method's clients and of its server, stays one.
            if other == kind or (its not in given and path in values and values.get(its, MISSING) == values[path]):
                changed = _replaced(method, getattr(method, other), rest.split("."), given[path], path)
                method = dataclasses.replace(method, **{other: changed})
    return method


def _unknown(method: Method, path: str) -> UnknownNameError:
    known = [setting.path for setting in settings_of(method)]
    return UnknownNameError(
        f"method {method.name!r} has no option {path!r}; {nearest(path, [*known, *KINDS])}; {_where(method.name)}"
    )


def _where(name: str) -> str:
    return f"`sparsekit describe {name}` shows its options, `sparsekit list options` those of a run"


def _policy(value: Any, kind: str) -> Any:
    if isinstance(value, Policy):
        return value
    text = str(value)
    public = [getattr(policies, name) for name in policies.__all__ if not name.endswith("Policy")]
    named = {_spelled(one.__name__): one for one in public if isinstance(one, type) and issubclass(one, Policy)}
    if ":" not in text and _spelled(text) not in named:
        hint = nearest(_spelled(text), [name for name, one in named.items() if issubclass(one, annotation_of(Method, kind))])
        raise UnknownNameError(f"{kind} must be a policy, got {text!r}; {hint}, or package.module:Class")
    found = parse_value(Policy, text, name=kind) if ":" in text else named[_spelled(text)]
    try:
        return found() if isinstance(found, type) else found
    except TypeError as error:
        raise InvalidValueError(
            f"{kind}={text} cannot be made from its defaults: {error}; pass package.module:object"
        ) from error


def _spelled(name: str) -> str:
    """`PowerOfChoice` as `power-of-choice`, as options name it."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


def _replaced(method: Method, owner: Any, path: list[str], value: Any, whole: str) -> Any:
    name, *rest = path
    fields = {field.name for field in dataclasses.fields(owner) if field.init} if dataclasses.is_dataclass(owner) else set()
    if name not in fields:
        raise _unknown(method, whole)
    if rest:
        return dataclasses.replace(owner, **{name: _replaced(method, getattr(owner, name), rest, value, whole)})
    return dataclasses.replace(owner, **{name: _value(annotation_of(type(owner), name), value, whole)})


def _value(hint: Any, value: Any, path: str) -> Any:
    """A value of the right type, from text, or as TOML has it."""
    if isinstance(value, list):
        value = tuple(value)
    if _names_criterion(hint) and isinstance(value, str):
        found = criteria.find(value)
        return found() if isinstance(found, type) else found
    if isinstance(value, str) and (known := _dataclasses(hint)):
        if value in known:
            return known[value]()
        if ":" not in value and value.lower() not in ("", "none"):
            raise InvalidValueError(f"{path} must be none, {' or '.join(known)}, or package.module:object, got {value!r}")
    if isinstance(value, str):
        value = parse_value(hint, value, name=path)
    if hint is not None and not _names_criterion(hint):
        Option(path, hint, MISSING).check(value)
    return value


def _dataclasses(hint: Any) -> dict[str, Any]:
    """Name → class of the dataclasses that an annotation allows: their names stand for one with its defaults."""
    parts = get_args(hint) or (hint,)
    return {part.__name__: part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)}


def _names_criterion(hint: Any) -> bool:
    return hint is Criterion or any(_names_criterion(part) for part in get_args(hint))


def _settings(owner: Any, prefix: str, source: str) -> list[Setting]:
    if not dataclasses.is_dataclass(owner) or isinstance(owner, type):
        return []
    texts, found = _documented(type(owner)), []
    for field in dataclasses.fields(owner):
        if not field.init:
            continue
        value, path = getattr(owner, field.name), f"{prefix}.{field.name}"
        own = Setting(
            path=path,
            value=value,
            allowed=_allowed(annotation_of(type(owner), field.name)),
            about=texts.get(field.name, ""),
            owner=type(owner).__name__,
            source=_source(type(owner)) or source,
        )
        found += _settings(value, path, source) or [own]
    return found


def _allowed(hint: Any) -> str:
    if hint is None:
        return ""
    if _names_criterion(hint):
        return f"a criterion: {', '.join(criteria)}, or package.module:object"
    if _dataclasses(hint) and type(None) in get_args(hint):
        return f"none, {', '.join(_dataclasses(hint))}, or package.module:object"
    if hint is bool:
        return "true or false"
    if hint is str:
        return "a word"
    try:
        return described(hint)
    except (TypeError, IndexError, AttributeError):
        return str(hint)


def _documented(owner: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of arguments."""
    found: dict[str, str] = {}
    for one in reversed(owner.__mro__):
        found.update(_arguments(inspect.cleandoc(vars(one).get("__doc__") or "")))
    return found


def _arguments(text: str) -> dict[str, str]:
    """What the section `Args` of a docstring says."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    found: dict[str, str] = {}
    for line in section[1].splitlines() if section else ():
        begun = re.match(r"    (\w+): (.*)", line)
        if begun:
            name = begun[1]
            found[name] = begun[2]
        elif found and line.strip():
            found[name] += " " + line.strip()
    return found


def _source(owner: type) -> str:
    section = re.search(r"^Source: (.*(?:\n[ \t]+.*)*)", inspect.cleandoc(owner.__doc__ or ""), re.MULTILINE)
    return re.sub(r"\s+", " ", section[1]).strip() if section else ""
