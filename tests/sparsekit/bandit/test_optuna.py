"""BanditSampler: Optuna's own tests of samplers, and what becomes of each kind of trial.

Of Optuna's suites all apply but `MultiObjectiveSamplerTestCase`: a bandit has one reward, so several objectives are refused,
which `SingleOnlySamplerTestCase` asks for.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

optuna = pytest.importorskip("optuna")

from optuna.distributions import FloatDistribution, IntDistribution  # noqa: E402
from optuna.testing.pytest_samplers import (  # noqa: E402
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)
from optuna.trial import TrialState, create_trial  # noqa: E402

from sparsekit.bandit.optuna import BanditSampler  # noqa: E402
from sparsekit.errors import InvalidValueError, UnknownNameError  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.ERROR)

UNIT = FloatDistribution(0.0, 1.0)


# One that takes a box, and one that takes an interval alone.
@pytest.mark.parametrize("bandit", ["split-ucbv", "p-ucbv"])
class TestOptunaContract(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self, bandit: str) -> Callable[[], Any]:
        return lambda: BanditSampler(bandit, seed=0)


def study_of(sampler: Any, direction: str = "maximize", **options: Any) -> Any:
    return optuna.create_study(sampler=sampler, direction=direction, **options)


def told(sampler: Any) -> list[tuple[Any, float]]:
    ((_, bandit),) = sampler._search._groups
    return [(pull.value, reward) for pull, reward in bandit.told]


def add(study: Any, x: float, value: float | None = None, state: Any = TrialState.COMPLETE, **more: Any) -> None:
    study.add_trial(create_trial(state=state, value=value, params={"x": x}, distributions={"x": UNIT}, **more))


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_an_infinite_value_counts_as_the_worst_known_or_is_not_told(direction: str) -> None:
    sampler = BanditSampler("p-ucbv", seed=0)
    study = study_of(sampler, direction)
    sign = 1.0 if direction == "maximize" else -1.0
    add(study, 0.1, -sign * math.inf)
    add(study, 0.2, sign * math.inf)
    add(study, 0.3, 1.0)
    study.ask({"x": UNIT})
    assert told(sampler) == [(0.3, sign)]
    ((_, bandit),) = sampler._search._groups
    assert [entry["value"] for entry in bandit.state_dict()["log"] if "forget" in entry] == [0.1]


@pytest.mark.parametrize("space", [None, {"x": UNIT}])
def test_a_study_looks_at_every_part_first_with_and_without_its_space(space: Any) -> None:
    for seed in range(6):
        study = study_of(BanditSampler(seed=seed, space=space))
        study.optimize(lambda trial: -((trial.suggest_float("x", 0.0, 1.0) - 0.3) ** 2), n_trials=5)
        assert {int(5.0 * trial.params["x"]) for trial in study.trials} == set(range(5))


def test_a_pruned_trial_is_told_its_last_intermediate_value() -> None:
    sampler = BanditSampler("p-ucbv", seed=0)
    study = study_of(sampler)
    add(study, 0.5, 1.0)
    add(study, 0.9, state=TrialState.PRUNED, intermediate_values={1: 0.75, 5: 0.25, 3: 0.5})
    add(study, 0.8, state=TrialState.PRUNED)
    add(study, 0.7, state=TrialState.PRUNED, intermediate_values={1: math.nan})
    study.ask({"x": UNIT})
    assert told(sampler) == [(0.5, 1.0), (0.9, 0.25)]


def _fails_above_half(way: str, x: float) -> float:
    if x <= 0.5:
        return x
    if way == "raises":
        raise MemoryError
    if way == "is pruned":
        raise optuna.TrialPruned
    return math.nan


@pytest.mark.filterwarnings("ignore:The value nan")
@pytest.mark.parametrize("way", ["raises", "is pruned", "gives NaN"])
@pytest.mark.parametrize("bandit", ["split-ucbv", "p-ucbv"])
def test_values_that_fail_are_avoided(bandit: str, way: str) -> None:
    for axis, parts in ((UNIT, 1), (IntDistribution(0, 20), 20)):
        study = study_of(BanditSampler(bandit, seed=0, space={"x": axis}), "maximize")
        for _ in range(60):
            trial = study.ask({"x": axis})
            try:
                study.tell(trial, _fails_above_half(way, trial.params["x"] / parts))
            except (MemoryError, optuna.TrialPruned, ValueError) as error:
                study.tell(trial, state=TrialState.PRUNED if isinstance(error, optuna.TrialPruned) else TrialState.FAIL)
        failed = [t.params["x"] for t in study.trials if t.state != TrialState.COMPLETE]
        assert len(failed) <= 30
        assert max((failed.count(x) for x in failed), default=0) <= 2
        assert study.best_value >= 0.35


def test_one_exact_repetition_is_enough() -> None:
    whole = IntDistribution(0, 30)
    study = study_of(BanditSampler(seed=0, space={"x": whole}), "maximize")
    for _ in range(40):
        trial = study.ask({"x": whole})
        study.tell(trial, -abs(trial.params["x"] - 13))
    values = [t.params["x"] for t in study.trials]
    assert max(values.count(x) for x in values) <= 2


def test_categories_and_branches_come_from_the_independent_sampler() -> None:
    calls = []

    class Noted(optuna.samplers.RandomSampler):  # type: ignore[misc, name-defined]
        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            calls.append((trial.number, name))
            return super().sample_independent(study, trial, name, distribution)

    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0.0, 1.0)
        if trial.suggest_categorical("kind", ["a", "b"]) == "a":
            return x + float(trial.suggest_float("of_a", 0.0, 1.0))
        return x + int(trial.suggest_int("of_b", 1, 3))

    sampler = BanditSampler("p-ucbv", seed=0, independent_sampler=Noted(seed=0))
    study = study_of(sampler)
    study.optimize(objective, n_trials=20)
    assert (0, "x") in calls
    assert {name for number, name in calls if number > 0} == {"kind", "of_a", "of_b"}
    assert len(told(sampler)) == 19
    assert all(0.0 <= value <= 1.0 for value, _ in told(sampler))


def test_many_threads_lose_no_trial() -> None:
    sampler = BanditSampler("p-ucbv", seed=0)
    study = study_of(sampler)
    study.optimize(lambda trial: -abs(trial.suggest_float("x", 0.0, 1.0) - 0.3), n_trials=60, n_jobs=4)
    study.ask({"x": UNIT})
    assert len(study.trials) == 61
    assert sorted(told(sampler)) == sorted((trial.params["x"], trial.value) for trial in study.trials[:60])


def test_the_trial_that_the_bandit_recommends_is_no_lucky_one() -> None:
    whole = IntDistribution(0, 1)
    sampler = BanditSampler("p-ucbv", seed=0, arms=2, min_width=0.5, space={"x": whole})
    study = study_of(sampler)
    assert sampler.recommended(study) is None
    for value in (5.0, -5.0, 1.0, 2.0, 1.5, 1.0):
        trial = study.ask({"x": whole})
        study.tell(trial, value - 10.0 if trial.params["x"] == 0 else -9.0 + trial.number / 100)
    found = sampler.recommended(study)
    means = {x: np.mean([t.value for t in study.trials if t.params["x"] == x]) for x in (0, 1)}
    assert found is not None
    assert found.params["x"] == max(means, key=lambda x: means[x])


def test_what_is_not_allowed_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'p-ucbv'"):
        BanditSampler("p-ucb")
    with pytest.raises(InvalidValueError, match="failed must be 'worst' or 'forget', got 'no'"):
        BanditSampler(failed="no")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="has no option color"):
        BanditSampler("p-ucbv", color=1)
    two = optuna.create_study(directions=["minimize", "minimize"], sampler=BanditSampler())
    with pytest.raises(InvalidValueError, match="one objective, and the study has 2"):
        two.ask({"x": UNIT})
