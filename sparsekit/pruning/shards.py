"""Shards: the safetensors files of a pruned model, written one after the other."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from sparsekit.graph import cut_axes, gather
from sparsekit.pruning.result import PrunePlan
from sparsekit.surgery.rebuild import named_entries
from sparsekit.transformers.widths import tensors_of

_SHARD_BYTES = 2**29


class Shards:
    """The shards of a pruned model: one for each of its `blocks`, if there are some, and others of half a GiB."""

    def __init__(
        self, folder: Path, narrow: nn.Module, buffers: Iterable[str], plan: PrunePlan, weights: Mapping[str, Tensor],
        blocks: Sequence[str],
    ) -> None:  # fmt: skip
        self._folder, self._plan, self._weights = folder, plan, weights
        entries = named_entries(narrow)
        first = {id(entry): name for name, entry in reversed(entries.items())}
        shapes = {name: entry for name, entry in entries.items() if first[id(entry)] == name}
        shapes |= {name: tensors_of(narrow)[name] for name in buffers if name not in entries}
        self._shapes = {name: entry.to("meta") for name, entry in shapes.items()}
        self._bytes = {name: entry.nbytes for name, entry in shapes.items()}
        own = {block: [name for name in shapes if name.startswith(f"{block}.")] for block in blocks}
        inside = {name for names in own.values() for name in names}
        shards: list[list[str]] = [[]]
        for name in (name for name in shapes if name not in inside):
            if shards[-1] and sum(self._bytes[each] for each in (*shards[-1], name)) > _SHARD_BYTES:
                shards.append([])
            shards[-1].append(name)
        shards = [names for names in (*shards, *own.values()) if names]
        files = [folder / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        self._shards = dict(zip(files if len(files) > 1 else [folder / "model.safetensors"], shards))
        self._of_block = dict(zip(own, [*self._shards][len(shards) - len(own) :]))

    def write(self) -> None:
        """Write the kept part of every tensor, shard by shard, and an index; complete shards are not written again."""
        graph, mask = self._plan.graph, self._plan.mask
        indices, numbers = graph.kept_indices(mask) | graph.kept_constants(mask), graph.numbers(mask.counts())

        def piece(name: str) -> Tensor:
            whole = self._weights[name]
            kept = gather(whole, cut_axes(whole.shape, indices.get(name, {})))
            if name in graph.integer_entries:
                return torch.full_like(kept, numbers[graph.integer_entries[name]])
            return kept

        for file, names in self._shards.items():
            if not file.exists():
                self._write(names, piece, file)
        if len(self._shards) > 1:
            where = {name: file.name for file, names in self._shards.items() for name in names}
            index = {"metadata": {"total_size": sum(self._bytes.values())}, "weight_map": where}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def write_block(self, name: str, block: nn.Module) -> None:
        """Write the shard of a block."""
        file, tensors = self._of_block[name], tensors_of(block)
        self._write(self._shards[file], lambda key: tensors[key.removeprefix(f"{name}.")].detach(), file)

    def has_block(self, name: str) -> bool:
        return self._of_block[name].exists()

    def remove_blocks(self) -> None:
        for file in self._of_block.values():
            file.unlink(missing_ok=True)

    def _write(self, names: Sequence[str], tensor_of: Callable[[str], Tensor], file: Path) -> None:
        """Write a shard under another name first, so that a file with the name of a shard is complete."""
        temporary = file.with_name(f".{file.name}.tmp")
        try:
            write_tensors({name: self._shapes[name] for name in names}, tensor_of, temporary)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


def write_tensors(shapes: Mapping[str, Tensor], tensor_of: Callable[[str], Tensor], file: Path) -> None:
    """Write a safetensors file with one tensor in memory at a time; `save_file` of safetensors needs all of them.

    Args:
        shapes: Name → a tensor of the shape and dtype, such as one on the meta device.
        tensor_of: Returns a tensor, by name. It is called once for each, in the order of the file.
        file: The file.
    """
    names = sorted(shapes, key=lambda name: (-shapes[name].itemsize, name))  # so each tensor is aligned, as in `save_file`
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + shapes[name].nbytes
        dtype = json.loads(save({"": torch.empty(0, dtype=shapes[name].dtype)})[8:])[""]["dtype"]
        header[name] = {"dtype": dtype, "shape": list(shapes[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensor_of(name)
            assert (tensor.shape, tensor.dtype) == (shapes[name].shape, shapes[name].dtype), name
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is read
