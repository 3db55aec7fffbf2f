"""The options by which commands that cut a model name it; `model_source` reads what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = ["CheckpointOption", "DeviceOption", "ExampleShapeOption", "ModelArgument"]

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
