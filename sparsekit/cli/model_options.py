"""The options that commands which cut a model share; `model_source` and `data_source` read what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

_DATA, _RUN = "Data", "The run"

ModelArgument: TypeAlias = Annotated[
    str, typer.Argument(help="A built-in model, package.module:factory or path/to/file.py:factory.")
]

CheckpointOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="Trained weights: a state dict as safetensors, or as torch saves it.")
]

ExampleShapeOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Shape of an example input, as in 1,3,32,32; with :int64 behind it for token ids, with NAME= before it for a"
        " keyword input. Once per input. Default: what the model brings along."
    ),
]

DeviceOption: TypeAlias = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, …")]

NormOption: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="[fixed|kept]", help="'kept' also takes units under layer norms, which are then taken over the kept units."
    ),
]

DataOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="A data set by name, package.module:loader or path/to/file.py:loader: batches, or (training, validation).",
        rich_help_panel=_DATA,
    ),
]

DataDirOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder of the data sets; without it they are fetched once.", rich_help_panel=_DATA)
]

BatchSizeOption: TypeAlias = Annotated[
    int, typer.Option(help="Examples in a batch of a data set by name.", rich_help_panel=_DATA)
]

LossOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="cross_entropy, mse_loss, …, package.module:loss, or outputs for that of the model.", rich_help_panel=_DATA
    ),
]

MetricOption: TypeAlias = Annotated[
    str | None,
    typer.Option(help="accuracy, loss, or package.module:metric of a model; larger is better.", rich_help_panel=_DATA),
]

ScoringBatchesOption: TypeAlias = Annotated[
    int, typer.Option(help="Batches that a criterion scores on.", rich_help_panel=_DATA)
]

SeedOption: TypeAlias = Annotated[int, typer.Option(help="Random seed.", rich_help_panel=_RUN)]

QuietOption: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=_RUN)]

JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout and nothing else.", rich_help_panel=_RUN)
]
