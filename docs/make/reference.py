"""Pages of the API reference, one for each task: every public name with its signature, its documentation and an example.

The names are those of tests/public_api.txt, which a test compares with `__all__`; the examples are in docs/reference/examples.
"""

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

from sparsekit_fl.options import Checked, options_of

_WIDTH = 96
TASKS: dict[str, str] = {
    "Prune": "prune Budget Pruned PruneReport finetune reconstruct recalibrate_batchnorm finetuning BudgetError",
    "Train narrow": "LearnableMask GradientImportance NarrowModel training",
    "Units and masks": "trace_units UnitGraph UnitMask compact expand make_mask mask_from_scores UnitGroup UnitSlice WeightMask"
    " graph tracing LayerRule layers",
    "Criteria and allocations": "criteria.Magnitude criteria.Fisher criteria.Wanda criteria.Taylor allocation.by_cost"
    " allocation.by_loss Criterion ScoringContext Allocation criteria allocation",
    "Measure": "count_cost cost_model Cost measure",
    "Save and export": "save_compact load_compact load_mask surgery save_pretrained load_pretrained fit_config",
    "Bandits": "SplitUCBV PUCBV Interval Box Pull Bandit bandit",
    "Errors": "errors",
    "Run federated learning": "fl.run fl.Problem fl.Client fl.ClientData fl.RunConfig fl.TrainingConfig fl.methods fl.RunResult"
    " fl.load_result fl.load_model fl.build_problem fl.preset_for fl.TensorData fl.Capability fl.callbacks fl.metrics"
    " fl.engines",
    "Write a federated method": "fl.Method fl.Task fl.Update fl.mean fl.sgd fl.units fl.ClientContext fl.ServerContext fl",
}
"""Page → names, the most important ones first; `fl` is sparsekit_fl. A module brings all that is in it."""


@dataclass(frozen=True)
class Page:
    """One page.

    Args:
        path: Below docs/.
        title: In the navigation.
        text: Markdown.
    """

    path: str
    title: str
    text: str


def names_of(root: Path) -> list[str]:
    """Return the public names, sorted."""
    return (root / "tests" / "public_api.txt").read_text(encoding="utf-8").split()


def examples_of(root: Path) -> dict[str, str]:
    """Return name → code. In the files an example follows a line `# name`, several names by commas."""
    found: dict[str, str] = {}
    for path in sorted((root / "docs" / "reference" / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8").split("# --- examples ---\n", 1)[1]
        for block in re.split(r"(?m)^(?=# sparsekit)", text):
            head, _, code = block.partition("\n")
            if not head.startswith("# "):
                continue
            for name in head[2:].split(", "):
                found[name.strip()] = code.strip()
    names = names_of(root)
    for name in names:
        template = _template(name)
        if template and name not in found:
            found[name] = template
    # The same object under another name has the same example.
    known = {id(_find(name)): code for name, code in found.items() if name in names and callable(_find(name))}
    for name in names:
        if name not in found and id(_find(name)) in known:
            found[name] = known[id(_find(name))]
    return found


def _template(name: str) -> str | None:
    """Return the example of names that are all used alike: methods."""
    kind, _, last = name.rpartition(".")
    if kind == "sparsekit_fl.methods":
        return f"result = fl.run(fl.methods.{last}(), problem, clients, config)"
    return None


@cache
def pages_of(root: Path) -> tuple[Page, ...]:
    """Make a page for each task; every public name is on one of them."""
    examples, first = examples_of(root), dict[int, str]()
    places = {name: _place(name) for name in names_of(root)}
    found = {task: sorted((place, name) for name, (where, place) in places.items() if where == task) for task in TASKS}
    paths = {name: f"{_slug(where)}.md#{name}" for name, (where, _) in places.items()}
    return tuple(
        Page(f"reference/{_slug(task)}.md", task, _page(task, [name for _, name in names], examples, first, paths))
        for task, names in found.items()
    )


def _slug(task: str) -> str:
    return task.lower().replace(" ", "-")


def _place(name: str) -> tuple[str, tuple[int, bool, str]]:
    """Return the page of a public name, and where on it: by its own entry in `TASKS` or that of its nearest module."""
    best: tuple[int, str, int] = (-1, "Prune", 0)
    for task, listed in TASKS.items():
        for place, short in enumerate(listed.split()):
            root, _, rest = short.partition(".")
            full = f"sparsekit_fl.{rest}".rstrip(".") if root == "fl" else f"sparsekit.{short}"
            if name == full or name.startswith(f"{full}."):
                best = max(best, (len(full), task, place))
    return best[1], (best[2], isinstance(_find(name), ModuleType) is False, name.lower())


def _find(name: str) -> Any:
    root, *parts = name.split(".")
    found: Any = importlib.import_module(root)
    for part in parts:
        found = getattr(found, part)
    return found


def _page(task: str, names: list[str], examples: dict[str, str], first: dict[int, str], paths: dict[str, str]) -> str:
    lines = [f"# {task}", "", "| name | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {_first_line(_find(name)).replace('|', chr(92) + '|')} |" for name in names[:10]]
    lines.append("")
    for name in names:
        found = _find(name)
        lines += [f"## `{name}` {{ #{name} }}", ""]
        # What is documented under a shorter name first is only pointed at.
        elsewhere = first.setdefault(id(found), name) if callable(found) else name
        if isinstance(found, ModuleType):
            lines += [f"A module: {_first_line(found)}", ""]
        elif elsewhere != name:
            lines += [f"The same as [`{elsewhere}`]({paths[elsewhere]}).", "", *_code(signature_of(name, found))]
        else:
            home = _home(found)
            lines += [*_code(signature_of(name, found)), _value_text(found) if home is None else f"::: {home}", ""]
            # Options are described where they are declared, and not in the docstring.
            options = options_of(found) if inspect.isclass(found) and issubclass(found, Checked) else {}
            lines += [*(f"- `{each}`: {option.about}" for each, option in options.items() if option.about), ""]
        lines += _example(examples.get(name) or examples.get(elsewhere))
    return "\n".join(lines)


def _example(code: str | None) -> list[str]:
    return ["Example:", "", *_code(code)] if code else []


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _first_line(found: Any) -> str:
    if not (inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, ModuleType)):
        return _value_text(found)
    return (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")


def _home(found: Any) -> str | None:
    """Return where a class or function is defined; None for other objects, and for functions that other functions made."""
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return None
    source = inspect.getsource(importlib.import_module(found.__module__))
    if not re.search(rf"^ *(?:def|class) {found.__name__}\b", source, re.M):
        return None
    return f"{found.__module__}.{found.__qualname__}"


def _value_text(found: Any) -> str:
    if inspect.isroutine(found):
        return inspect.getdoc(found) or ""
    if type(found).__name__ == "Registry":
        return f"The names of each {found.kind}, a mapping: {', '.join(f'`{each}`' for each in found)}."
    return "A type, for annotations." if get_origin(found) else f"A value of type `{type(found).__name__}`."


def signature_of(name: str, found: Any) -> str:
    """Write a call of a public name, or its value, as code."""
    if get_origin(found):
        return f"{name} = {re.sub(r'(?:collections[.]abc|typing|torch|sparsekit(?:_fl)?)[.](?:[a-z_]+[.])*', '', repr(found))}"
    if not callable(found):
        text = repr(found)
        return f"{name} = {text}" if len(text) < _WIDTH else f"{name}: {type(found).__name__}"
    if getattr(found, "_is_protocol", False):
        return f"class {name}(Protocol): ..."
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return f"{name}(...)"
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    line = f"{name}{signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)}"
    line = re.sub(r"<(?:class|function|bound method) '?([\w.]+)[^>]*>", r"\1", line)
    line = re.sub(r"<factory>|<[\w.]+ object at 0x[0-9a-f]+>", "...", line)
    if len(line) <= _WIDTH:
        return line
    inner = line[len(name) + 1 : -1]
    return f"{name}(\n    " + ",\n    ".join(_parts(inner)) + ",\n)"


def _parts(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]
