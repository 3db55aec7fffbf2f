"""Pages of the API reference: every public name with its signature, its documentation and an example.

The names are those of tests/public_api.txt, which a test compares with `__all__`; the examples are in docs/reference/examples.
"""

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOTS = ("sparsekit", "sparsekit_fl")
_WIDTH = 96


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
    """Make a page for each module that has public names."""
    names, examples = names_of(root), examples_of(root)
    modules = {name for name in names if isinstance(_find(name), ModuleType)} | set(_ROOTS)
    first: dict[int, str] = {}
    pages = []
    for module in sorted(modules):
        own = [name for name in names if name.rpartition(".")[0] == module]
        pages.append(Page(f"reference/{module}.md", module, _page(module, own, modules, examples, first)))
    return tuple(pages)


def _find(name: str) -> Any:
    root, *parts = name.split(".")
    found: Any = importlib.import_module(root)
    for part in parts:
        found = getattr(found, part)
    return found


def _page(module: str, names: list[str], modules: set[str], examples: dict[str, str], first: dict[int, str]) -> str:
    about = (inspect.getdoc(_find(module)) or "").split("\n\n")[0].replace("\n", " ")
    lines = [f"# `{module}`", "", about, ""]
    # What is documented under a shorter name first is only pointed at.
    for name in names:
        found = _find(name)
        lines += [f"## `{name}` {{ #{name} }}", ""]
        if name in modules:
            lines += [f"A module: [{name}]({name}.md). {_first_line(found)}", ""]
            lines += _example(examples.get(name))
            continue
        elsewhere = first.get(id(found)) if callable(found) else None
        if elsewhere is not None:
            page = elsewhere.rpartition(".")[0]
            lines += [f"The same as [`{elsewhere}`]({page}.md#{elsewhere}).", ""]
            lines += ["```python", signature_of(name, found), "```", ""]
            lines += _example(examples.get(name) or examples.get(elsewhere))
            continue
        first[id(found)] = name
        lines += ["```python", signature_of(name, found), "```", ""]
        where = _home(found)
        if where is None:
            lines += [_value_text(found), ""]
        else:
            lines += [f"::: {where}", ""]
        lines += _example(examples.get(name))
    return "\n".join(lines)


def _example(code: str | None) -> list[str]:
    return ["Example:", "", "```python", code, "```", ""] if code else []


def _first_line(found: Any) -> str:
    return (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")


def _home(found: Any) -> str | None:
    """Return where a class or function is defined; None for other objects."""
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return None
    return f"{found.__module__}.{found.__qualname__}"


def _value_text(found: Any) -> str:
    kind = type(found).__name__
    if kind == "Registry":
        return f"The names of each {found.kind}, a mapping: {', '.join(f'`{each}`' for each in found)}."
    return f"A value of type `{kind}`."


def signature_of(name: str, found: Any) -> str:
    """Write a call of a public name, or its value, as code."""
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
