"""Search: which sets make a check fail, by halving. It knows nothing of models: a set is anything that can be told apart."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST = 64
"""Checks after which a search that has found something ends; not by time, so that results are reproducible."""

Set = TypeVar("Set", bound=Hashable)
Failure = TypeVar("Failure")


@dataclass
class Search(Generic[Set, Failure]):
    """Finds sets at fault.

    Once a set is found, others of its cause are tried one by one: most fail for the same reason.

    Args:
        cause: What a set and its failure have in common with others that fail for one reason.
        near: The sets to begin with, where a failure points to some of them.
        most: Checks after which a search that has found something ends.
    """

    cause: Callable[[Set, Failure], Hashable]
    near: Callable[[Sequence[Set], Failure], Sequence[Set]] = lambda _sets, _failure: ()
    most: int = field(default_factory=lambda: MOST)
    tried: int = 0
    _known: set[Hashable] = field(default_factory=set)

    def failing(self, check: Callable[[Sequence[Set]], Failure | None], sets: Sequence[Set]) -> dict[Set, tuple[Failure, bool]]:
        """Return some of the sets at fault, each with its failure and whether only several of them fail, together.

        Args:
            check: Returns why some sets fail; None if they do not.
            sets: Those to search. If they fail, at least one of them is found; what is left must be searched again.
        """
        found: dict[Set, tuple[Failure, bool]] = {}

        def fails(some: Sequence[Set]) -> Failure | None:
            self.tried += 1
            return check(some)

        def visit(some: Sequence[Set]) -> None:
            if not some or (found and self.tried >= self.most) or (failure := fails(some)) is None:
                return
            if len(some) == 1:
                self._known.add(self.cause(some[0], failure))
                found[some[0]] = failure, False
                return
            before = len(found)
            for part in self._parts(some, failure):
                visit(part)
            if len(found) == before:
                found.update(dict.fromkeys(least(some), (failure, True)))

        def least(some: Sequence[Set]) -> Sequence[Set]:
            """Return a small part that still fails, where neither half fails by itself."""
            size = len(some) // 4 or len(some) // 3
            while size and self.tried < self.most:
                for start in range(0, len(some), size):
                    rest = [*some[:start], *some[start + size :]]
                    if fails(rest) is not None:
                        some = rest
                        break
                else:
                    size //= 2
            return some

        visit(sets)
        return found

    def _parts(self, some: Sequence[Set], failure: Failure) -> list[Sequence[Set]]:
        alike = [each for each in some if self.cause(each, failure) in self._known]
        if alike:
            return [*([each] for each in alike), [each for each in some if each not in alike]]
        near = self.near(some, failure)
        first = near if 0 < len(near) < len(some) else some[: len(some) // 2]
        return [first, [each for each in some if each not in first]]
