"""`sparsekit sweep METHOD`: tune any options of a run, and of its method, with Optuna or our bandits."""

from __future__ import annotations

import contextlib
import difflib
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit.errors import InvalidValueError, SparsekitError, UnknownNameError
from sparsekit_fl.cli.config_file import written
from sparsekit_fl.cli.experiment import Experiment, cores
from sparsekit_fl.cli.options import RunOptions, command_app, takes_options
from sparsekit_fl.options.checked import choices
from sparsekit_fl.options.schema import options as options_of
from sparsekit_fl.options.values import parse_value, read_settings

if TYPE_CHECKING:
    from sparsekit_fl.cli.study import Axis, Study
    from sparsekit_fl.results.records import RoundRecord

__all__ = ["objective_value", "sweep"]

INTERRUPTED, FAILED = 130, 2
_HOW = "How values are chosen"
_POLL_SECONDS = 0.25
_GOODBYE = ((3.0, signal.SIGINT), (15.0, signal.SIGKILL))


def _sweep(
    *,
    method: Annotated[str | None, typer.Argument(help="A method by name, or package.module:function.")] = None,
    vary: Annotated[
        list[str],
        typer.Option(
            help="NAME=LOW:HIGH (behind it :log, :int or both) or NAME=A,B,C: an option of the run by its name, or of the"
            " method by its path, as for --set. Once per option.",
            rich_help_panel=_HOW,
        ),
    ],
    trials: Annotated[int, typer.Option(help="Trials in all, those of an earlier call included.", rich_help_panel=_HOW)] = 20,
    sampler: Annotated[
        str, typer.Option(help="tpe, random, grid, or a bandit: p-ucbv, split-ucbv, …", rich_help_panel=_HOW)
    ] = "tpe",
    pruner: Annotated[
        str,
        typer.Option(help="Ends trials early that look bad: none, median, hyperband or halving.", rich_help_panel=_HOW),
    ] = "none",
    objective: Annotated[
        str,
        typer.Option(
            help="What counts: validation.METRIC of the personal models, never test data, or train.loss, train.accuracy.",
            rich_help_panel=_HOW,
        ),
    ] = "validation.accuracy",
    minimize: Annotated[
        bool | None,
        typer.Option("--minimize/--maximize", help="Whether less is better. Default: for a loss.", rich_help_panel=_HOW),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="URL of Optuna's storage, as in sqlite:///sweep.db. Default: a journal in --out.", rich_help_panel=_HOW
        ),
    ] = None,
    study: Annotated[str | None, typer.Option(help="Name in the storage. Default: the method.", rich_help_panel=_HOW)] = None,
    jobs: Annotated[
        int, typer.Option(help="Trials at a time, each with --workers processes.", rich_help_panel="How it is run")
    ] = 1,
    options: RunOptions,
) -> None:
    """Tune options of a run and of its method: every trial is a run, scored on validation data.

    The same command line goes on where an earlier call with the same --out (or --storage) ended: finished trials count, and
    trials that were interrupted go on from their last round. DIR gets a folder per trial, and best.toml for
    `sparsekit run --config`.
    """
    from sparsekit_fl.cli.study import Axis, Study

    if method is None:
        raise InvalidValueError("METHOD is missing; name one, as in `sparsekit sweep fedprox --vary lr=0.01:1:log`")
    for name, value in (("--trials", trials), ("--jobs", jobs)):
        if value < 1:
            raise InvalidValueError(f"{name} must be an integer >= 1, got {value}")
    axes = [Axis.parse(text) for text in vary]
    plan = _Plan(method, options.replaced(resume=False, out=None), objective, _less_is_better(objective, minimize))
    rounds = plan.check(axes)
    described = {
        "method": method,
        "vary": vary,
        "objective": objective,
        "minimize": plan.minimize,
        "sampler": sampler,
        **{name: str(value) for name, value in _settings_of(options).items()},
    }
    found = Study(
        study or method, axes, described, maximize=not plan.minimize, sampler=sampler, pruner=pruner, seed=options.seed or 0,
        jobs=jobs, rounds=rounds, storage=storage, out=options.out,
    )  # fmt: skip
    if jobs > 1 and options.workers is None:
        plan = plan.with_workers(max(1, cores() // jobs))
    try:
        _run(plan, found, trials, jobs, options.out, quiet=options.quiet or options.json)
    except KeyboardInterrupt:
        kept = "nothing was kept, since there was no --out DIR" if options.out is None else "the same command line goes on"
        typer.echo(f"stopped by the user after {len(found.ended)} of {trials} trials; {kept}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    _report(plan, found, options)


def _less_is_better(objective: str, minimize: bool | None) -> bool:
    group, _, metric = objective.partition(".")
    if group not in ("validation", "train") or not metric:
        raise InvalidValueError(f"--objective must be validation.METRIC or train.METRIC, got {objective!r}")
    return metric.endswith("loss") if minimize is None else minimize


def _settings_of(options: RunOptions) -> dict[str, Any]:
    given = options.values()
    momentary = ("out", "quiet", "json", "workers", "resume", "config")
    return {name: value for name, value in given.items() if name not in momentary and value not in (None, False)}


@dataclass(frozen=True)
class _Plan:
    """What every trial has in common.

    Args:
        method: As the user wrote it.
        options: Those of the command line.
        objective: What counts.
        minimize: Whether less is better.
    """

    method: str
    options: RunOptions
    objective: str
    minimize: bool

    def with_workers(self, workers: int) -> _Plan:
        return _Plan(self.method, self.options.replaced(workers=workers), self.objective, self.minimize)

    def with_values(self, values: Mapping[str, str]) -> RunOptions:
        """The options of a trial.

        Raises:
            InvalidValueError, UnknownNameError: a value, or a name, that is not allowed.
        """
        hints = {choice.name: choice.hint for choice in choices(RunOptions)}
        own = {name: value for name, value in values.items() if name not in hints}
        given = {name: parse_value(hints[name], value, name=name) for name, value in values.items() if name in hints}
        texts = [f"{path}={value}" for path, value in {**read_settings(self.options.set or ()), **own}.items()]
        return self.options.replaced(**given, set=tuple(texts) or None)  # type: ignore[no-any-return]

    def check(self, axes: Sequence[Axis]) -> int:
        """Try the ends of every axis, and return the number of rounds.

        Raises:
            InvalidValueError, UnknownNameError: a name or a value that no trial could run with.
        """
        from sparsekit_fl.methods.make import make_method
        from sparsekit_fl.options.config import RunConfig, TrainingConfig
        from sparsekit_fl.paper.presets import preset_for

        names = [axis.name for axis in axes]
        if len(set(names)) < len(names):
            raise InvalidValueError(f"--vary names {', '.join(sorted({n for n in names if names.count(n) > 1}))} twice")
        rounds = 1
        for axis in axes:
            for end in axis.ends():
                self._known(axis.name)
                options = self.with_values({axis.name: end})
                make_method(self.method, bandit=options.bandit, settings=options.settings())
                preset = preset_for(preset=options.preset, dataset=options.dataset)
                config = preset.config(options.given(TrainingConfig, RunConfig), options.clients or preset.clients)
                rounds = max(rounds, config.rounds)
        return rounds

    def _known(self, name: str) -> None:
        if "." in name:
            return
        from sparsekit_fl.methods import registry
        from sparsekit_fl.methods.settings import arguments_of
        from sparsekit_fl.options.config import RunConfig, TrainingConfig

        options = [choice.name for choice in choices(RunOptions)]
        arguments = [setting.path for setting in arguments_of(registry.find(self.method.split()[0].partition("@")[0]))]
        kinds = ("sampling", "ratio", "mask", "local", "share", "aggregate", "personal")
        if name not in (*options, *arguments, *kinds):
            offered = [*options_of(RunConfig, TrainingConfig), *arguments]
            close = difflib.get_close_matches(name, offered, n=1)
            raise UnknownNameError(
                f"--vary {name}: no option of a run or of {self.method!r};"
                + (f" did you mean {close[0]!r}?" if close else "")
                + f" `sparsekit run --help` and `sparsekit list method {self.method.split()[0]}` show them"
            )


def objective_value(record: RoundRecord, objective: str) -> float | None:
    """The score of a round; None where it was not evaluated.

    Args:
        record: The round.
        objective: `validation.METRIC` or `train.METRIC`.

    Raises:
        InvalidValueError: it was evaluated, and has no such metric.
    """
    group, _, metric = objective.partition(".")
    if group == "train":
        scores = {name: value for name, value in (("loss", record.loss), ("accuracy", record.accuracy)) if value is not None}
    elif record.evaluation is None:
        return None
    else:
        scores = dict(record.evaluation.validation)
    if metric not in scores:
        raise InvalidValueError(f"--objective {objective}: the run has {group} metrics {', '.join(sorted(scores)) or 'none'}")
    return scores[metric]


def _run_one(connection: Connection, plan: _Plan, values: Mapping[str, str], folder: Path | None) -> None:
    """Run one trial in a process of its own, and send the score of each round; the last event is how it ended."""
    from sparsekit_fl.errors import RunInterrupted
    from sparsekit_fl.methods.make import make_method
    from sparsekit_fl.results.records import Observer
    from sparsekit_fl.server.checkpoint import holds_run
    from sparsekit_fl.server.loop import run

    class Scores(Observer):
        last: float | None = None

        def on_round(self, record: RoundRecord) -> None:
            score = objective_value(record, plan.objective)
            if score is not None:
                self.last = score
                connection.send({"round": record.round, "score": score})

    with contextlib.suppress(BrokenPipeError):
        try:
            options, scores = plan.with_values(values), Scores()
            experiment = Experiment.of(options)
            method = make_method(plan.method, bandit=options.bandit, settings=options.settings())
            result = run(
                method, experiment.problem, experiment.clients, experiment.config, engine=experiment.engine,
                observers=[scores], out=folder, resume=folder is not None and holds_run(folder),
                experiment=experiment.described, init=options.init,
            )  # fmt: skip
            last = objective_value(result.rounds[-1], plan.objective)
            connection.send({"ended": last})
        except (RunInterrupted, KeyboardInterrupt):
            connection.send({"interrupted": True})
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - a trial may fail in any way; the others go on
            text = str(error) if isinstance(error, SparsekitError) else f"{type(error).__name__}: {error}"
            connection.send({"failed": text})


def _run(plan: _Plan, study: Study, trials: int, jobs: int, out: Path | None, *, quiet: bool) -> None:
    from sparsekit_fl.processes import Children, start_method

    console = Console(stderr=True)

    def say(text: str) -> None:
        if not quiet:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    def fresh() -> Iterator[Any]:
        yield from study.left_over()
        while not study.exhausted:
            yield study.ask()

    more = fresh()
    with Children(start_method(plan.options.device), _GOODBYE, daemon=False) as children:
        while True:
            while len(children) < jobs and len(study.ended) + len(children) < trials:
                trial = next(more, None)
                if trial is None:
                    break
                values = study.texts(trial)
                folder = None if out is None else out / f"trial-{trial.number:04d}"
                children.start(_run_one, plan, values, folder, task=trial)
                say(f"trial {trial.number}: {_line(values)}")
            if not len(children):
                return
            for child, event in children.poll(_POLL_SECONDS):
                if event is not None and "round" in event:
                    if study.report(child.task, event["score"], event["round"]):
                        study.tell(child.task, None, pruned=True)
                        say(f"trial {child.task.number}: pruned after round {event['round']} at {event['score']:.4g}")
                        child.process.terminate()
                        children.remove(child)
                    continue
                if event is not None and "interrupted" in event:
                    raise KeyboardInterrupt
                score = None if event is None else event.get("ended")
                reason = "" if score is not None else f"its process ended by {child.ending()}" if event is None else ""
                reason = reason or (event or {}).get("failed", "" if score is not None else "it has no score")
                study.tell(child.task, score, reason=reason)
                say(
                    f"trial {child.task.number}: " + (f"failed: {reason}" if score is None else f"{plan.objective} {score:.4g}")
                )
                children.remove(child)


def _line(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _report(plan: _Plan, study: Study, options: RunOptions) -> None:
    best, ended = study.best(), study.ended
    rows = [
        {
            "trial": trial.number,
            "state": trial.state.name.lower(),
            "score": trial.value,
            "values": study.texts(trial),
            **({"error": trial.user_attrs["error"]} if "error" in trial.user_attrs else {}),
        }
        for trial in ended
        if set(trial.params) == {axis.name for axis in study.axes}
    ]
    if best is not None and options.out is not None:
        chosen = plan.with_values(study.texts(best))
        (options.out / "best.toml").write_text(written(plan.method, chosen.values()), encoding="utf-8")
    if options.json:
        about = {"objective": plan.objective, "minimize": plan.minimize, "trials": rows}
        found = None if best is None else {"trial": best.number, "score": best.value, "values": study.texts(best)}
        typer.echo(json.dumps({**about, "best": found}, indent=1, allow_nan=False))
    else:
        _print(plan, study, rows)
        if best is not None and options.out is not None:
            typer.echo(f"The best: sparsekit run --config {options.out / 'best.toml'}")
    if best is None:
        last = next((row["error"] for row in reversed(rows) if "error" in row), "all were pruned")
        typer.echo(f"error: no trial was finished; the last: {last}", err=True)
        raise typer.Exit(FAILED)


def _print(plan: _Plan, study: Study, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=escape(f"{plan.method}: {len(rows)} trials, {plan.objective}"), title_justify="left")
    for name in ("trial", "state", plan.objective, *(axis.name for axis in study.axes)):
        table.add_column(escape(name), justify="right")
    finished = sorted(
        (row for row in rows if row["score"] is not None), key=lambda row: row["score"] * (1 if plan.minimize else -1)
    )
    for row in [*finished, *(row for row in rows if row["score"] is None)][:15]:
        score = "" if row["score"] is None else f"{row['score']:.4g}"
        table.add_row(str(row["trial"]), row["state"], score, *(f"{_short(value)}" for value in row["values"].values()))
    Console().print(table)


def _short(value: str) -> str:
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value


sweep = command_app(
    takes_options(
        _sweep,
        without=(
            "resume",
            "central_test",
        ),
    ),
    examples=(
        "sparsekit sweep fedavg --vary lr=0.01:1:log --trials 10",
        "sparsekit sweep fedprox --vary lr=0.01:1:log --vary local.proximal=0.001:1:log --pruner median --out runs/sweep",
        "sparsekit sweep fedavg --vary lr=0.01:1:log --sampler p-ucbv --jobs 2 --out runs/bandit",
        "sparsekit sweep heterofl --vary mask.criterion=ordered,magnitude,random --sampler grid --out runs/grid",
    ),
    defaults=False,
)
