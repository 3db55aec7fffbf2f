"""Old names work for one minor release, say what to write instead, and are gone when their release comes."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit import deprecations, patterns
from sparsekit.criteria import registry
from sparsekit.deprecations import RENAMED, PatternCriterion, RemovedIn0_3Warning
from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit.graph.graph import UnitGraph
from sparsekit.tracing.trace import trace_units


def _model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 4)


def _masked(**options: Any) -> sk.LearnableMask:
    model, x = _model()
    return sk.LearnableMask(model, (x,), **options)


def _warned(call: Callable[[], Any], message: str) -> Any:
    """What `call` returns; it must warn once, at this file."""
    with pytest.warns(RemovedIn0_3Warning, match=message) as caught:
        found = call()
    assert [item.filename for item in caught] == [__file__]
    return found


@pytest.mark.parametrize("name", [name for name in dir(deprecations) if name.startswith("RemovedIn")])
def test_no_old_name_outlives_the_release_that_was_named(name: str) -> None:
    removed = tuple(int(part) for part in re.findall(r"\d+", name))
    assert tuple(int(part) for part in sk.__version__.split(".")[:2]) < removed, f"remove what warns with {name}, and the class"


@pytest.mark.filterwarnings("error")
def test_a_present_value_passes_without_a_warning() -> None:
    assert deprecations.renamed_value("norm", "kept", {"frozen": "fixed"}) == "kept"


@pytest.mark.parametrize("name", [name for name in RENAMED if name != "patterns"])  # a module warns when first imported
def test_every_old_name_is_found_and_warns(name: str) -> None:
    assert _warned(lambda: getattr(sk, name), rf"sparsekit.{name} is deprecated and goes with sparsekit 0.3; use sparsekit\.")
    assert name not in sk.__all__


def test_old_names_are_the_new_objects() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RemovedIn0_3Warning)
        assert sk.CompactSession is sk.NarrowModel
        assert issubclass(sk.PatternView, sk.View)
        assert sk.patterns.Magnitude is sk.criteria.Magnitude
        assert sk.patterns.TopImportance is sk.criteria.Learned
        assert sk.patterns.registry is sk.criteria.registry
        assert sk.patterns.select is sk.select
        assert sk.patterns.keep_count(0.5, 5) == 3
        assert sk.patterns.Rolling().step == 1


def test_unknown_names_are_still_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'patern'"):
        _ = sk.patern
    with pytest.raises(AttributeError, match="no attribute 'Magnitud'"):
        _ = patterns.Magnitud


@pytest.mark.parametrize("name", sorted(patterns._RENAMED))
def test_the_old_module_can_be_imported_and_each_of_its_names_warns(name: str) -> None:
    assert _warned(lambda: getattr(patterns, name), rf"sparsekit.patterns.{name} is deprecated")


def test_importing_the_old_module_warns_in_a_new_process() -> None:
    program = "import warnings; warnings.simplefilter('error', DeprecationWarning); import sparsekit; sparsekit.patterns"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "RemovedIn0_3Warning: sparsekit.patterns is deprecated" in done.stderr


def test_a_program_of_0_1_runs() -> None:
    model, x = _model()
    graph = sk.trace_units(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RemovedIn0_3Warning)
        mask = sk.select(sk.patterns.Magnitude(), graph, 0.5, sk.PatternView(weights=model.state_dict(), round=3))
        rolled = sk.select(sk.patterns.Rolling(), graph, 0.25, sk.PatternView(round=3))
    assert mask == sk.select(sk.criteria.Magnitude(), graph, 0.5, sk.View(weights=model.state_dict()))
    assert rolled["0"].nonzero().flatten().tolist() == [3, 4]


class Last:
    """A pattern of somebody else: the last units stay."""

    def keep(self, group: Any, count: int, view: Any) -> Tensor:
        assert view.weights is not None
        return torch.arange(group.size) >= group.size - count


def test_a_pattern_of_somebody_else_still_picks_its_units() -> None:
    model, x = _model()
    graph = sk.trace_units(model, x)
    view = sk.View(weights=model.state_dict())
    mask = _warned(lambda: sk.select(Last(), graph, 0.25, view), "an object with `keep` is deprecated")
    assert mask["0"].tolist() == [False] * 6 + [True] * 2


def test_a_learnable_mask_takes_a_pattern_of_somebody_else_and_follows_its_ratio() -> None:
    with pytest.warns(RemovedIn0_3Warning, match="use a criterion"):
        masked = _masked(criterion=Last(), ratio=0.25)
    assert masked.unit_mask()["0"].tolist() == [False] * 6 + [True] * 2
    masked.ratio = 0.5
    assert masked.unit_mask()["0"].tolist() == [False] * 4 + [True] * 4
    assert isinstance(masked.criterion, PatternCriterion)


def test_old_keywords_and_attributes_of_a_learnable_mask_work() -> None:
    masked = _warned(
        lambda: _masked_by_pattern(), "the keyword 'pattern' is deprecated and goes with sparsekit 0.3; use 'criterion'"
    )
    assert masked.unit_mask()["0"].tolist() == [True] * 4 + [False] * 4
    assert _warned(lambda: masked.pattern, r"LearnableMask.pattern is deprecated .*; use criterion") is masked.criterion
    assert _warned(lambda: masked.term, "use regularizer") is masked.regularizer
    _warned(lambda: masked.refresh(), "use sync")
    _warned(lambda: masked.redraw(), "use resample")


def _masked_by_pattern() -> sk.LearnableMask:
    model, x = _model()
    return sk.LearnableMask(model, (x,), pattern=sk.criteria.Ordered(), ratio=0.5)  # type: ignore[call-arg]


def test_an_old_keyword_beside_its_new_name_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"'criterion' twice, also by its old name 'pattern'"):
        _masked(pattern=sk.criteria.Ordered(), criterion=sk.criteria.Ordered())


def test_fixed_units_are_found_by_their_old_name() -> None:
    model, x = _model()
    graph = sk.trace_units(model, x)
    assert _warned(lambda: graph.frozen, r"UnitGraph.frozen is deprecated .*; use fixed") == graph.fixed
    assert _warned(lambda: UnitGraph(graph.groups, graph.shapes, frozen=graph.fixed), "'frozen'").fixed == graph.fixed
    assert _warned(lambda: NoUnitsError("nothing", (1,)).frozen, "use fixed") == (1,)


def test_the_old_value_of_norm_works_and_unknown_ones_do_not() -> None:
    model, x = _model()
    graph = _warned(lambda: trace_units(model, x, norm="frozen"), "norm='frozen' is deprecated .*; use 'fixed'")  # type: ignore[arg-type]
    assert graph.fingerprint() == trace_units(model, x).fingerprint()
    with pytest.raises(InvalidValueError, match="norm must be 'fixed' or 'kept', got 'frosen'"):
        trace_units(model, x, norm="frosen")  # type: ignore[arg-type]


def test_a_criterion_is_found_by_its_old_name_and_not_listed_by_it() -> None:
    assert (
        _warned(lambda: registry["importance"], "criterion='importance' is deprecated .*; use 'learned'") is sk.criteria.Learned
    )
    assert "importance" in registry
    assert "importance" not in list(registry)


def test_a_narrow_model_is_remasked_by_the_old_name() -> None:
    model, x = _model()
    graph = sk.trace_units(model, x)
    narrow = sk.NarrowModel(model, graph)
    mask = sk.select(sk.criteria.Ordered(), graph, 0.5, sk.View())
    _warned(lambda: narrow.rekey(mask), r"NarrowModel.rekey is deprecated .*; use remask")
    assert narrow.mask == mask
