"""A search finds sets at fault and no others, whatever is planted."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings

from sparsekit.tracing.search import Search

SETS = st.integers(1, 24)
FAULTS = st.lists(st.frozensets(st.integers(0, 23), min_size=1, max_size=3), max_size=5)


def rounds(check: object, size: int, search: Search[int, str]) -> tuple[dict[int, tuple[str, bool]], list[int]]:
    """Search until nothing that is left fails, as a trace does; return what was found and what is left."""
    found: dict[int, tuple[str, bool]] = {}
    left = list(range(size))
    while failed := search.failing(check, left):  # type: ignore[arg-type]
        assert failed.keys() <= set(left)
        found |= failed
        left = [each for each in left if each not in failed]
    return found, left


@given(SETS, FAULTS, st.integers(1, 8), st.integers(1, 200))
@settings(deadline=None)
def test_what_is_left_passes_and_what_is_found_is_at_fault(
    size: int, faults: list[frozenset[int]], kinds: int, most: int
) -> None:
    def check(some: Sequence[int]) -> str | None:
        return next((str(sorted(fault)) for fault in faults if fault <= set(some)), None)

    search = Search[int, str](lambda each, failure: each % kinds, lambda some, _: [x for x in some if x % 5 == 0], most)
    found, left = rounds(check, size, search)
    assert check(left) is None
    for each, (_, jointly) in found.items():
        assert jointly or check([each]) is not None  # one that is found by itself fails by itself
    if most == 200:  # no search was ended early
        alone = {each for fault in faults if len(fault) == 1 for each in fault if each < size}
        assert alone <= found.keys() <= set().union(*faults)


@given(SETS, st.sets(st.integers(0, 1000)), st.integers(1, 30))
@settings(deadline=None)
def test_a_check_without_any_rule_ends_the_search_with_what_passes(size: int, odd: set[int], most: int) -> None:
    def check(some: Sequence[int]) -> str | None:
        return "fails" if some and sum(2**each for each in some) % 1001 in odd else None

    found, left = rounds(check, size, Search(lambda each, _: each, most=most))
    assert check(left) is None
    assert sorted([*found, *left]) == list(range(size))
