"""FolderWeights: the weights of a folder of transformers, read one at a time; filled(): a module that has them for a while."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
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
        except (SafetensorError, RuntimeError, LookupError) as error:
            raise _damaged(folder, error) from error
        if lacking := sorted(found["missing_keys"]):
            raise CompactFileError(f"the weights in {folder} lack {lacking[0]!r} and {len(lacking) - 1} more; copy them again")
        self._folder, self._tensors = folder, tensors_of(model)
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
        try:
            found: Tensor = self._homes[name][name.rpartition(".")[2]]
        except (SafetensorError, OSError) as error:
            raise _damaged(self._folder, error) from error
        return found.to(tensor.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def dtype_of(self, name: str) -> Any:
        """Return the dtype of a tensor without reading it."""
        return self._tensors[name].dtype


def _damaged(folder: str | os.PathLike[str], error: Exception) -> CompactFileError:
    return CompactFileError(f"the weights in {folder} cannot be read: {error}; copy or download them again")


@contextmanager
def filled(module: nn.Module, prefix: str, weights: Mapping[str, Tensor], but: Collection[str] = ()) -> Iterator[None]:
    """Give a module on the meta device its parameters and buffers inside the block; tied ones are one tensor.

    Args:
        module: The module.
        prefix: What the names of its tensors start with in `weights`, such as "model.layers.0."; or empty.
        weights: Name → tensor.
        but: Names of modules inside that stay empty.
    """
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[int, Tensor] = {}
    try:
        for name, home in module.named_modules():
            path = f"{prefix}{name}." if name else prefix
            if path.startswith(tuple(f"{prefix}{each}." for each in but)):
                continue
            for table in (home._parameters, home._buffers):
                for entry, old in table.items():
                    if old is None:
                        continue
                    if id(old) not in made:
                        value = weights[path + entry]
                        made[id(old)] = nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value
                    before.append((table, entry, old))
                    table[entry] = made[id(old)]
        yield
    finally:
        for table, entry, old in before:
            table[entry] = old


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
