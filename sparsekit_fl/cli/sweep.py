"""`sparsekit sweep METHOD`: tune any options of a run, and of its method, with Optuna or our bandits."""

from __future__ import annotations

import contextlib
import difflib
import functools
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekit.bandit import Axis, Ended, Score, ends, parse_axes
from sparsekit.cli import command_app
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.cli.config_file import written
from sparsekit_fl.cli.experiment import Experiment, cores
from sparsekit_fl.cli.options import PathsCommand, RunOptions, known_options, takes_options

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from sparsekit_fl.processes import Children
    from sparsekit_fl.results.scores import RoundRecord

_how = functools.partial(typer.Option, rich_help_panel="How values are chosen")
_POLL_SECONDS = 0.25
_PATIENCE_SECONDS = 60.0


def _sweep(
    *,
    method: Annotated[str | None, typer.Argument(help="A method by name, or package.module:function.")] = None,
    space: Annotated[
        list[str],
        _how(
            help="PATH=LOW:HIGH (behind it :log, :int or both) or PATH=A,B,C: an option of the run or of the method, as for"
            " --set. Once per option."
        ),
    ],
    trials: Annotated[int, _how(min=1, help="Trials in all, those of an earlier call included.")] = 20,
    sampler: Annotated[
        str,
        _how(help="What chooses values: tpe, random, grid, or a bandit (p-ucbv, split-ucbv, …, or package.module:object)."),
    ] = "tpe",
    pruner: Annotated[
        str,
        _how(help="How trials that look bad are stopped early: none, median, hyperband or halving."),
    ] = "none",
    metric: Annotated[
        str,
        _how(help="What counts: validation.METRIC of the personal models, never test data, or train.loss, train.accuracy."),
    ] = "validation.accuracy",
    maximize: Annotated[
        bool | None,
        _how("--maximize/--minimize", help="Whether more is better. Default: --minimize for a loss."),
    ] = None,
    storage: Annotated[
        str | None,
        _how(help="URL of Optuna's storage, as in sqlite:///sweep.db. Default: a journal in --out."),
    ] = None,
    study: Annotated[str | None, _how(help="Name of the study in the storage. Default: the method.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Trials at a time, each with --workers processes.", rich_help_panel="How it is run")
    ] = 1,
    options: RunOptions,
) -> None:
    """Tune options of a run and of its method: every trial is a run, scored on validation data.

    The same command line goes on where an earlier call with the same --out (or --storage) ended: finished trials count, and
    trials that were interrupted go on from their last round. DIR gets a folder per trial, trials.json, and best.toml for
    `sparsekit run --config`.
    """
    from sparsekit.bandit import Study
    from sparsekit.cli import run_search
    from sparsekit_fl.processes import Children, start_method
    from sparsekit_fl.results.state.storage import write_atomically

    if method is None:
        raise InvalidValueError("METHOD is missing; name one, as in `sparsekit sweep fedprox --space lr=0.01:1:log`")
    axes, out = parse_axes(space), options.out
    plan = _Plan(method, options.replaced(resume=False, out=None), metric)
    rounds = plan.check(axes)
    settings = {"method": method, "space": space, "metric": metric, "sampler": sampler, **_settings_of(options)}
    more = not metric.endswith("loss") if maximize is None else maximize
    if jobs > 1 and options.workers is None and options.engine != "cohort":
        plan = replace(plan, options=plan.options.replaced(workers=max(1, cores() // jobs)))

    def how(name: str, trial: FrozenTrial) -> str:
        if out is None:
            return ", ".join(f"{name}={value}" for name, value in found.texts(trial).items())
        text = written(method, plan.options.with_paths(found.texts(trial)).given)
        write_atomically(out / f"{name}.toml", text.encode(), private=options.dp_noise_seed is not None)
        return f"sparsekit run --config {out / name}.toml"

    with Study(
        study or method, axes, settings | {"maximize": more}, maximize=more, sampler=sampler, pruner=pruner,
        seed=options.seed or 0, trials=trials, jobs=jobs, steps=rounds, storage=storage, out=out,
    ) as found, Children(start_method(options.device), daemon=False) as children:  # fmt: skip
        run_search(
            found, _Runs(plan, out, children), trials, metric=metric, out=out, quiet=options.quiet, as_json=options.json,
            how=how,
        )  # fmt: skip


def _settings_of(options: RunOptions) -> dict[str, str]:
    """What was given and must be equal for a sweep to go on; zero is a value like any other."""
    momentary = ("out", "quiet", "json", "workers", "resume", "config", "log", "accept_code")
    return {name: str(value) for name, value in options.given.items() if name not in momentary}


@dataclass(frozen=True)
class _Plan:
    """What every trial has in common.

    Args:
        method: As the user wrote it.
        options: Those of the command line.
        metric: What counts.
    """

    method: str
    options: RunOptions
    metric: str

    def check(self, axes: Mapping[str, Axis]) -> int:
        """Try the ends of every axis, and return the number of rounds.

        Raises:
            InvalidValueError, UnknownNameError: a name or a value that no trial could run with.
        """
        from sparsekit_fl.methods.make import make_method
        from sparsekit_fl.options.config import RunConfig, TrainingConfig
        from sparsekit_fl.paper.presets import preset_for

        group, _, metric = self.metric.partition(".")
        if group not in ("validation", "train") or not metric:
            raise InvalidValueError(f"--metric must be validation.METRIC or train.METRIC, got {self.metric!r}")
        rounds = 1
        for name, axis in axes.items():
            for end in ends(axis):
                _check_name(name, self.method)
                options = self.options.with_paths({name: end})
                make_method(self.method, settings=options.settings())
                preset = preset_for(preset=options.preset, dataset=options.dataset)
                config = preset.config(options.given_of(TrainingConfig, RunConfig), options.clients or preset.clients)
                rounds = max(rounds, config.rounds)
        return rounds


def _check_name(name: str, method: str) -> None:
    """Refuse what is no option of a run or of the method; those with a dot are checked with their values."""
    from sparsekit_fl.methods import registry
    from sparsekit_fl.methods.settings import arguments_of

    plain = method.split()[0]
    arguments = [setting.path for setting in arguments_of(registry.find(plain.partition("@")[0]))]
    kinds = ("sampling", "ratio", "mask", "local", "share", "aggregate", "personal")
    offered = [*known_options(), *arguments]
    if "." not in name and name not in (*offered, *kinds):
        close = difflib.get_close_matches(name, offered, n=1)
        raise UnknownNameError(
            f"--space {name}: no option of a run or of {method!r};{f' did you mean {close[0]!r}?' if close else ''}"
            f" `sparsekit list options` and `sparsekit describe {plain}` show them"
        )


def score_of(record: RoundRecord, metric: str) -> float | None:
    """The score of a round; None where it was not evaluated.

    Args:
        record: The round.
        metric: `validation.METRIC` or `train.METRIC`.

    Raises:
        InvalidValueError: it was evaluated, and has no such metric.
    """
    group, _, name = metric.partition(".")
    if group == "train":
        scores = {name: value for name, value in (("loss", record.loss), ("accuracy", record.accuracy)) if value is not None}
    elif record.evaluation is None:
        return None
    else:
        scores = dict(record.evaluation.validation)
    if name not in scores:
        raise InvalidValueError(f"--metric {metric}: the run has {group} metrics {', '.join(sorted(scores)) or 'none'}")
    return scores[name]


def _run_one(connection: Connection, plan: _Plan, values: Mapping[str, str], folder: Path | None) -> None:
    """Run one trial in a process of its own, and send a Score for each round, then an Ended, or a KeyboardInterrupt."""
    from sparsekit_fl.callbacks.base import Callback, RunView
    from sparsekit_fl.cli.trials import error_text
    from sparsekit_fl.errors import RunInterrupted
    from sparsekit_fl.methods.make import make_method
    from sparsekit_fl.processes import end_with_parent
    from sparsekit_fl.results.state.storage import lock_folder
    from sparsekit_fl.server.checkpoint import holds_run

    # Those of the process that this one was forked from only take note.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()

    class Scores(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            score = score_of(record, plan.metric)
            if score is not None:
                connection.send(Score(record.round, score))

    # Where nobody listens any more, the trial stops; it goes on when the command line is given again.
    with contextlib.suppress(BrokenPipeError):
        try:
            if folder is not None:
                # The trial of a sweep that was killed still writes there until its round ends.
                lock_folder(folder, wait_seconds=_PATIENCE_SECONDS).release()
            options = plan.options.with_paths(values).replaced(out=folder)
            experiment = Experiment.of(options)
            method = make_method(plan.method, settings=options.settings())
            result = experiment.run(
                method, options, [Scores(), *options.loggers()], resume=folder is not None and holds_run(folder)
            )
            connection.send(Ended(score_of(result.rounds[-1], plan.metric), "the last round was not scored"))
        except (RunInterrupted, KeyboardInterrupt):
            connection.send(KeyboardInterrupt())
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - a trial may fail in any way; the others go on
            connection.send(Ended(None, error_text(error)))


class _Runs:
    """Runs of a plan as the workers of a study."""

    def __init__(self, plan: _Plan, out: Path | None, children: Children) -> None:
        self._plan, self._out, self._children = plan, out, children

    def start(self, number: int, values: Mapping[str, str]) -> None:
        folder = None if self._out is None else self._out / f"trial-{number:04d}"
        self._children.start(_run_one, self._plan, values, folder, task=number)

    def poll(self) -> Iterator[tuple[int, Score | Ended]]:
        for child, event in self._children.poll(_POLL_SECONDS):
            if isinstance(event, KeyboardInterrupt):
                raise event
            if event is None:
                event = Ended(None, f"its process ended by {child.ending()}")
            if isinstance(event, Ended):
                self._children.remove(child)
            yield child.task, event

    def stop(self, number: int) -> None:
        child = next(child for child in self._children if child.task == number)
        child.process.terminate()
        self._children.remove(child)


# So that its own options have room on one page of help.
_HIDDEN = ("heterogeneity", "batch_size", "lr", "optimizer", "deterministic", "log", "accept_code")

sweep = command_app(
    takes_options(_sweep, without=("resume", "central_test"), hidden=_HIDDEN),
    examples=(
        "sparsekit sweep fedavg --space lr=0.01:1:log --trials 10",
        "sparsekit sweep fedprox --space lr=0.01:1:log --space local.proximal=0.001:1:log --pruner median --out runs/sweep",
        "sparsekit sweep fedavg --space lr=0.01:1:log --sampler p-ucbv --jobs 2 --out runs/bandit",
        "sparsekit sweep heterofl --space mask.criterion=ordered,magnitude,random --sampler grid --out runs/grid",
    ),
    cls=PathsCommand,
)
