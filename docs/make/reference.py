"""Pages of the API reference, one for each task: every documented name with its signature, its documentation and an example.

A test compares `TASKS` with the public names of both packages; the examples are in docs/reference/examples.
"""

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

from sparsekit_fl.config import Checked, options_of

_WIDTH = 96
TASKS: dict[str, str] = {
    "Prune": "prune plan prune_folder Budget Pruned finetune Distillation reconstruct recalibrate_batchnorm count_cost",
    "Train narrow": "LearnableMask LearnedNarrowing",
    "Units and masks": "trace_units UnitGraph UnitMask allocation.make_mask compact expand",
    "Criteria and allocations": "criteria.Magnitude criteria.Fisher criteria.Wanda criteria.Taylor"
    " criteria.Random allocation.by_cost allocation.by_loss allocation.uniform allocation.by_ratio"
    " allocation.Schedule",
    "Save and export": "save_compact load_compact export_onnx export_gguf save_pretrained load_pretrained",
    "Bandits": "bandit.SplitUCBV bandit.Interval bandit.Box bandit.BanditSampler bandit.PUCBV",
    "Errors": "errors fl.errors",
    "Run federated learning": "fl.run fl.Problem fl.Client fl.ClientData fl.RunConfig fl.TrainingConfig fl.methods fl.RunResult"
    " fl.load_result fl.load_model fl.Comparison fl.TensorData fl.build_problem fl.preset_for fl.Capability"
    " fl.callbacks.EarlyStopping fl.callbacks.BestCheckpoint fl.callbacks.TensorBoard fl.metrics.accuracy",
    "Write a federated method": "fl.Method fl.Task fl.Update fl.mean fl.sgd fl.units fl.Result fl.ClientContext"
    " fl.ServerContext fl.Setup fl.Model fl.adapters fl.option",
    "Extend": "Criterion ScoringContext mask_from_scores Allocation allocation.Problem LayerRule layers.Tracer"
    " layers.TensorLabels UnitGroup bandit.Bandit bandit.Pull GradientImportance fit_config surgery.export_program"
    " fl.Callback fl.DataSource fl.Engine fl.Request fl.Reply",
}
"""Page → names, the most important ones first; `fl` is sparsekit_fl. A module of errors brings all that are in it."""
FOR_AUTHORS = ("Write a federated method", "Extend")
"""Pages for authors of plug-ins; most of their names are not in `__all__`."""


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


@cache
def names_of() -> dict[str, str]:
    """Return documented name → its page, in the order of the pages."""
    found: dict[str, str] = {}
    for task, listed in TASKS.items():
        for short in listed.split():
            root, _, rest = short.partition(".")
            name = f"sparsekit_fl.{rest}" if root == "fl" else f"sparsekit.{short}"
            inside = [f"{name}.{each}" for each in _find(name).__all__] if name.endswith(".errors") else [name]
            found.update((each, task) for each in inside if inside == [name] or inspect.isclass(_find(each)))
    return found


def examples_of(root: Path) -> dict[str, str]:
    """Return name → code. In the files an example follows a line `# name`, several names by commas."""
    found: dict[str, str] = {}
    for path in sorted((root / "docs" / "reference" / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8").split("# --- examples ---\n", 1)[1]
        for block in re.split(r"(?m)^(?=# sparsekit)", text):
            head, _, code = block.partition("\n")
            if head.startswith("# "):
                found.update((name.strip(), code.strip()) for name in head[2:].split(", "))
    return found


def pages_of(root: Path) -> tuple[Page, ...]:
    """Make a page for each task."""
    examples = examples_of(root)
    return tuple(Page(f"reference/{task.lower().replace(' ', '-')}.md", task, _page(task, examples)) for task in TASKS)


def _find(name: str) -> Any:
    root, *parts = name.split(".")
    found: Any = importlib.import_module(root)
    for part in parts:
        found = getattr(found, part)
    return found


def _page(task: str, examples: dict[str, str]) -> str:
    names = [name for name, page in names_of().items() if page == task]
    lines = [f"# {task}", ""]
    if task in FOR_AUTHORS:
        lines += ["For authors of plug-ins. Names outside of `__all__` may change; the changelog then says how.", ""]
    lines += ["| name | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {_cell(_first_line(_find(name)))} |" for name in names[:10]]
    lines.append("")
    for name in names:
        found, code = _find(name), examples.get(name)
        lines += [f"## `{name}` {{ #{name} }}", ""]
        if isinstance(found, ModuleType):
            lines += [f"A module: {_first_line(found)}", ""]
            for each in found.__all__:
                inner = _find(f"{name}.{each}")
                if _is_described(inner):
                    lines += [f"### `{each}` {{ #{name}.{each} }}", "", _first_line(inner), "", *_options(inner)]
        else:
            home = _home(found)
            lines += [*_code(signature_of(name, found)), _value_text(found) if home is None else f"::: {home}", ""]
            lines += _options(found)
        lines += ["Example:", "", *_code(code)] if code else []
    return "\n".join(lines)


def _options(found: Any) -> list[str]:
    """Describe the options of a class, which says so where it declares them, and not in its docstring."""
    options = options_of(found) if inspect.isclass(found) and issubclass(found, Checked) else {}
    return [*(f"- `{each}`: {option.about}" for each, option in options.items() if option.about), ""]


def _is_described(found: Any) -> bool:
    """Return whether an object has documentation of its own: a class or a function."""
    return inspect.isclass(found) or inspect.isroutine(found)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _first_line(found: Any) -> str:
    if not (_is_described(found) or isinstance(found, ModuleType)):
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
