"""`sparsekit run METHOD` and `sparsekit fedlps`."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.experiment import Experiment
from sparsekit_fl.cli.options import RunOptions, command_app, takes_options
from sparsekit_fl.cli.outcome import show_outcome

__all__ = ["fedlps", "run"]

INTERRUPTED = 130
INCOMPLETE = 3


def _run(method_name: str, options: RunOptions) -> None:
    from sparsekit_fl.callbacks.progress import LiveProgress
    from sparsekit_fl.errors import RunInterrupted
    from sparsekit_fl.methods.make import make_method
    from sparsekit_fl.server.loop import run as run_rounds

    method = make_method(method_name, bandit=options.bandit)
    if method.capability is not None and options.capability not in (None, method.capability):
        raise InvalidValueError(
            f"--capability {options.capability} contradicts {method.name!r}, which is about {method.capability} capabilities;"
            " leave the option out"
        )
    experiment = Experiment.of(options)
    with LiveProgress(quiet=options.quiet or options.json) as progress:
        try:
            result = run_rounds(
                method,
                experiment.problem,
                experiment.clients,
                experiment.config,
                engine=experiment.engine,
                callbacks=[progress],
                out=options.out,
                resume=options.resume,
                accept_code=options.accept_code,
                experiment=experiment.described,
            )
        except RunInterrupted as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(INTERRUPTED) from None
    show_outcome(result, options)
    if result.failures or len(result.final.per_client) < len(experiment.clients):
        raise typer.Exit(INCOMPLETE)


def _fedlps(*, options: RunOptions) -> None:
    """Run FedLPS: a submodel per client, its size and its units learned while it trains.

    With no option: scikit-learn's digits, offline, in under a minute. `sparsekit run fedlps-paper` is the paper's wording.
    """
    _run("fedlps", options)


def _method(
    *, method: Annotated[str, typer.Argument(help="A method by name, or package.module:function.")], options: RunOptions
) -> None:
    """Run any federated method; `sparsekit list methods` shows them.

    Exit codes: 0, finished; 3, finished, though a client that was asked could never train, or could not be scored; 2, an
    option or a file that is wrong; 1, any other error; 130, stopped by Ctrl-C.
    """
    _run(method, options)


fedlps = command_app(
    takes_options(_fedlps),
    examples=(
        "sparsekit fedlps",
        "sparsekit fedlps --model vgg11 --rounds 5",
        "sparsekit fedlps --preset mnist --data-dir data --seed 1 --out runs/mnist",
        "sparsekit fedlps --preset mnist --data-dir data --seed 1 --out runs/mnist --resume",
        "sparsekit fedlps --dataset cifar10 --data-dir data --partition dirichlet --alpha 0.3 --json",
    ),
)

run = command_app(
    takes_options(_method),
    examples=(
        "sparsekit run fedavg",
        "sparsekit run local --preset mnist --data-dir data --out runs/local",
        "sparsekit run mypackage.methods:fedhalf --rounds 20",
    ),
)
