"""RunsOnExamples: runs a narrow model on the inputs of the trace before it is returned."""

from dataclasses import replace

import torch
from torch import nn

from sparsekit.errors import UnsupportedModelError
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.passes import ReadOnly, lent_copy, private_passes


class RunsOnExamples:
    """Runs a narrow model on the inputs of a trace, and raises if only the narrow model fails; once for equal widths."""

    def __init__(self, call: ModelInputs) -> None:
        self._call, self._seen = call, set[tuple[torch.Size, ...]]()

    def __call__(self, small: nn.Module, dense: nn.Module | None) -> None:
        widths = tuple(entry.shape for entry in named_entries(small).values())
        if widths in self._seen:
            return
        try:
            self._run(small, dense)
        except Exception as error:
            if dense is not None:
                try:
                    self._run(dense, dense)
                except Exception:  # noqa: BLE001 (it takes other inputs than at the trace, such as of another dtype)
                    return
            raise UnsupportedModelError(
                f"the compact {type(small).__name__} does not run on the example inputs ({type(error).__name__}: {error});"
                " name the layers in the message in exclude=, and please report it"
            ) from error
        self._seen.add(widths)

    def _run(self, model: nn.Module, dense: nn.Module | None) -> None:
        device = next((entry.device for entry in model.parameters()), None)
        guard = ReadOnly(model, *([] if dense is None else [dense]))  # a lambda inside may call the dense model
        with private_passes():
            replace(self._call.map(lambda tensor: tensor.to(device)), guard=guard).call(lent_copy(model))
