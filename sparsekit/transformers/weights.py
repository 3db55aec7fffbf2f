"""FolderWeights: the weights of a folder of transformers, read one at a time."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from sparsekit.errors import CompactFileError, require
from sparsekit.transformers.widths import tensors_of


class FolderWeights(Mapping[str, Tensor]):
    """Name of a parameter or buffer → tensor, read from the folder at each access, and not cached.

    transformers opens the folder as for a model that is offloaded to disk, and converts names and shapes. Weights that it
    merges, such as those of experts, are written to `scratch`. The others are read from the folder.
    """

    def __init__(self, kind: Any, folder: str | os.PathLike[str], scratch: str | os.PathLike[str]) -> None:
        require("accelerate")
        try:
            model, found = kind.from_pretrained(
                folder, device_map={"": "disk"}, offload_folder=scratch, output_loading_info=True
            )
        except (SafetensorError, RuntimeError) as error:
            raise CompactFileError(f"the weights in {folder} cannot be read: {error}; copy or download them again") from error
        if lacking := sorted(found["missing_keys"]):
            raise CompactFileError(f"the weights in {folder} lack {lacking[0]!r} and {len(lacking) - 1} more; copy them again")
        self._tensors = tensors_of(model)
        self._homes: dict[str, Mapping[str, Tensor]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            hooks = [getattr(module, "_hf_hook", None)]
            while hooks:
                hook: Any = hooks.pop()
                hooks += getattr(hook, "hooks", ())
                if (home := getattr(hook, "weights_map", None)) is not None:
                    self._homes |= dict.fromkeys((f"{name}.{own}" for own in _own(module)), home)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if not tensor.is_meta:
            return tensor
        found: Tensor = self._homes[name][name.rpartition(".")[2]]
        return found.to(tensor.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def dtype_of(self, name: str) -> Any:
        """Return the dtype of a tensor without reading it."""
        return self._tensors[name].dtype


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
