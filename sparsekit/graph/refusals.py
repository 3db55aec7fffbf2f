"""Summarize unprunable units: one line for each cause."""

import math
import re
from collections.abc import Iterable, Sequence

from sparsekit.graph.groups import Unprunable


def by_cause(items: Iterable[Unprunable]) -> list[tuple[str, str, str]]:
    """Return modules, numbers of units and the reason, for each cause: `("layers.{0–11}.mlp", "12 × 64", "…")`."""
    alike: dict[tuple[str, ...], list[Unprunable]] = {}
    for item in items:
        # Reasons from the comparison of outputs contain widths and differences, which vary between blocks.
        reason = re.sub(r"\d[\d.]*(e[+-]\d+)?", "#", item.reason) if item.kind == "inexact" else item.reason
        alike.setdefault((item.kind, reason, item.remedy, pattern_of(item.inside)), []).append(item)
    lines = []
    for some in alike.values():
        sizes: dict[tuple[str, int], list[str]] = {}
        for item in some:
            sizes.setdefault((pattern_of(item.module), item.size), []).append(item.module)
        numbers = [f"{len(names)} × {size}" if len(names) > 1 else str(size) for (_, size), names in sizes.items()]
        inside = folded(list(dict.fromkeys(item.inside for item in some)))
        lines.append((", ".join(folded(names) for names in sizes.values()), ", ".join(numbers), some[0].told(inside)))
    return lines


def folded(names: Sequence[str]) -> str:
    """Return names of modules in one line, with numbers as ranges: `encoder.layer.{0–11}.output`."""
    patterns: dict[str, list[tuple[str, ...]]] = {}
    for name in names:
        patterns.setdefault(pattern_of(name), []).append(tuple(filter(str.isdecimal, name.split("."))))
    texts = []
    for pattern, found in patterns.items():
        axes = [sorted(set(values), key=int) for values in zip(*found, strict=True)]
        whole = math.prod(map(len, axes)) == len(found)
        for numbers in [[_numbers(values) for values in axes]] if whole else found:
            places = iter(numbers)
            texts.append(".".join(next(places) if part == "#" else part for part in pattern.split(".")))
    return ", ".join(texts)


def pattern_of(name: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def _numbers(values: Sequence[str]) -> str:
    first, last = values[0], values[-1]
    if len(values) == 1:
        return first
    return f"{{{first}–{last}}}" if int(last) - int(first) == len(values) - 1 else f"{{{','.join(values)}}}"
