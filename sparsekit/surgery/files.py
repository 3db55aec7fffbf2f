"""The safetensors file of a compact model: tensors, and in its header a description as JSON with a proof.

A proof describes inputs, which are drawn again from a fixed seed, and the outputs of the saved model on them.
"""

import contextlib
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from sparsekit._torch import DispatchMode, operator_packet, set_mode, tree_leaves
from sparsekit.errors import CompactFileError, SparsekitError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit.rng import torch_generator, torch_scope
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.version import __version__

_KEY, _FORMAT = "sparsekit", 3
_SEED, _PROJECTIONS = 0, 4
# Relative rounding errors of one product on other processors and kernels: TF32 has 10 bits, bfloat16 has 7.
_ROUNDING, _ROUNDING_OF_HALVES = 1e-3, 1e-2
# The allowed difference of the outputs, as a share of their norm, is _FACTOR times the rounding of one product, or times the
# measured effect of rounding all products if that is larger. If it exceeds _MOST, the model gets no proof.
_FACTOR, _MOST = 10.0, 0.3
_HASHED = 2**16
"""Approximate number of values of a tensor that enter its hash."""


def write_file(path: Path, entries: StateDict, spec: Mapping[str, Any]) -> None:
    """Write tensors, tied ones once, and JSON values with format and version added. If this fails, an old file is unchanged."""
    description = {"format": _FORMAT, "sparsekit": __version__, **spec}
    header = {_KEY: json.dumps(description, separators=(",", ":"))}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch()  # raises a clear OSError if the folder is absent or not writable
    try:
        mode = temporary.stat().st_mode
        tensors = {name: entry.detach().cpu().contiguous() for name, entry in entries.items()}
        # The format allows no shared memory, so tensors that are views of larger ones are copied.
        apart = {name: t if t.nbytes == t.untyped_storage().nbytes() else t.clone() for name, t in tensors.items()}
        save_file(apart, temporary, metadata=header)
        # safetensors creates a file that only its owner may read.
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # a power cut must not leave a name without its bytes
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: Path, *, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the description that `write_file` wrote; an empty dict of tensors if `tensors` is False."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            # Copies have torch's memory alignment; otherwise the last bits of products would depend on the position in the
            # file.
            found = {name: file.get_tensor(name).clone() for name in file.keys()} if tensors else {}  # noqa: SIM118
    except SafetensorError as error:
        raise CompactFileError(
            f"{path} cannot be read: {error}; it is cut off, damaged or no safetensors file, so copy or save it again"
        ) from error
    if _KEY not in header:
        raise CompactFileError(f"{path} was not written by save_compact: its header has no {_KEY!r}; save the model with it")
    with damage(path):
        spec = json.loads(header[_KEY])
        if spec["format"] != _FORMAT:
            raise CompactFileError(
                f"{path} has format {spec['format']!r}, written by sparsekit {spec['sparsekit']}; this is {__version__}, which"
                f" reads format {_FORMAT}: install that version, or save again with this one"
            )
    return found, spec


@contextlib.contextmanager
def damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise CompactFileError if the block fails to read a description."""
    try:
        yield
    except SparsekitError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CompactFileError(f"the description in {path} is damaged ({error!r}); save the model again") from error


def digest(graph: UnitGraph) -> str:
    """Return the SHA-256 of the shapes, groups and slices of a graph, which identifies the graph of a saved mask."""
    sha = hashlib.sha256(repr([(name, tuple(shape)) for name, shape in graph.shapes.items()]).encode())
    for group in graph.groups.values():
        sha.update(repr((group.name, group.size)).encode())
        for piece in group.slices:
            sha.update(repr((piece.name, piece.dim)).encode())
            sha.update(piece.index.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def hash_state(state: Mapping[str, Any]) -> str:
    """Return a hash of names, shapes, types and values of the tensors of a state dict; large ones are sampled."""
    sha = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        if isinstance(value, Tensor):
            sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            own, step = value.detach(), 1 + value.numel() // _HASHED
            if type(own) is Tensor and own.layout is torch.strided and not own.is_quantized and not own.is_meta:
                flat = own.reshape(-1)[::step] if step > 1 else own.reshape(-1)
                sha.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def make_proof(model: nn.Module, example_inputs: tuple[Any, ...] | Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the model on random inputs, and describe them and the outputs as JSON data.

    Shapes, dtypes and ranges of the tensors in `example_inputs` are used, never their values. None if the inputs hold objects
    that JSON cannot describe, if the model fails on random inputs, or if its outputs are not finite, depend on random numbers,
    or change much by rounding.
    """
    inputs = _described(dict(example_inputs) if isinstance(example_inputs, Mapping) else tuple(example_inputs))
    if inputs is None or any(entry.is_meta for entry in named_entries(model).values()):
        return None
    rounding = _rounding(model)
    try:
        found, rounded = _outputs(model, inputs, 0), _outputs(model, inputs, 1, _Rounded(rounding))
    except Exception:  # noqa: BLE001 - whatever a model raises on inputs that it was not made for
        return None
    allowed = _FACTOR * max(rounding, _difference(found, rounded))
    if not found or not allowed <= _MOST:
        return None
    return {"inputs": inputs, "outputs": found, "allowed": allowed}


def check_proof(path: str | os.PathLike[str], model: nn.Module, proof: Mapping[str, Any]) -> None:
    """Run a loaded model on the inputs of a proof, and raise CompactFileError if its outputs differ."""
    try:
        found = _outputs(model, proof["inputs"], 0)
    except Exception as error:  # noqa: BLE001 - such as a type that this processor cannot multiply
        warnings.warn(f"{path}: the loaded {type(model).__name__} was not compared with the saved one: {error}", stacklevel=3)
        return
    difference = _difference(proof["outputs"], found)
    if not difference <= max(proof["allowed"], _FACTOR * _rounding(model)):
        raise CompactFileError(
            f"{path}: the outputs of the loaded {type(model).__name__} differ from those of the saved one by"
            f" {difference:.2g} of their size; use the code and the arguments of the dense model that was compacted"
        )


def _rounding(model: nn.Module) -> float:
    exact = all(entry.dtype.itemsize >= 4 for entry in named_entries(model).values() if entry.is_floating_point())
    return _ROUNDING if exact else _ROUNDING_OF_HALVES


class _Rounded(DispatchMode):
    """Adds noise to every product, as large as the rounding errors of other processors."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share, self._rng = share, torch_generator(np.random.default_rng(_SEED))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if operator_packet(func) not in flop_registry or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        noise = torch.randn(result.shape, generator=self._rng).to(result)
        return result + self._share * result.abs().mean() * noise


def _outputs(
    model: nn.Module, inputs: Any, seed: int, mode: contextlib.AbstractContextManager[Any] | None = None
) -> list[tuple[float, list[float]]]:
    copied = set_mode(copy_with(model, dict(model.named_parameters(remove_duplicate=False))), False)
    device = next((entry.device for entry in named_entries(model).values()), torch.device("cpu"))
    drawn = _drawn(inputs, np.random.default_rng(_SEED), device)
    args, kwargs = ((), drawn) if isinstance(drawn, dict) else (drawn, {})
    with torch_scope(np.random.default_rng(seed)), torch.no_grad(), mode or contextlib.nullcontext():
        leaves = tree_leaves(copied(*args, **kwargs))
    rng, found = np.random.default_rng(_SEED), []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.numel() and (leaf.is_floating_point() or leaf.is_complex()):
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            values = real.detach().cpu().double().flatten().numpy()
            norm = math.sqrt(float(values @ values))
            if not math.isfinite(norm):
                raise ValueError("the outputs are not finite")
            found.append((norm, [float(values @ (1 - 2 * rng.integers(2, size=len(values)))) for _ in range(_PROJECTIONS)]))
    return found


def _difference(a: list[tuple[float, list[float]]], b: list[tuple[float, list[float]]]) -> float:
    """Return the largest difference of two projections, relative to the norm; infinity if the numbers of outputs differ."""
    if len(a) != len(b):
        return math.inf
    sums = ((max(norm, 1e-300), np.subtract(one, two)) for (norm, one), (_, two) in zip(a, b, strict=True))
    return max((float(np.abs(apart).max()) / norm for norm, apart in sums), default=0.0)


def _described(value: Any) -> Any:
    """Return inputs as JSON data, tensors by their shape, dtype and range; None if they hold anything else."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
            return None
        low, high = (value.min().item(), value.max().item()) if value.numel() and not value.is_meta else (0, 0)
        if not math.isfinite(high - low):
            return None
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "range": [low, high]}
    if type(value) in (tuple, list, dict):
        keys = [*value] if type(value) is dict else None
        items = [_described(item) for item in (value.values() if type(value) is dict else value)]
        known = all(item is not None for item in items) and all(type(key) is str for key in keys or ())
        return {type(value).__name__: items, "keys": keys} if known else None
    return {"value": value} if type(value) in (bool, int, float, str, type(None)) else None


def _drawn(inputs: Any, rng: np.random.Generator, device: torch.device) -> Any:
    """Draw inputs from a description: numbers within its range, or floats between -1 and 1 if all were equal, such as zeros."""
    if "tensor" in inputs:
        shape, dtype, (low, high) = inputs["tensor"], getattr(torch, inputs["dtype"]), inputs["range"]
        if not dtype.is_floating_point:
            return torch.from_numpy(rng.integers(int(low), int(high) + 1, size=shape)).to(device, dtype)
        low, high = (low, high) if low < high else (-1.0, 1.0)
        return torch.from_numpy(low + (high - low) * rng.random(shape)).to(device, dtype)
    if "value" in inputs:
        return inputs["value"]
    kind = next(iter(inputs))
    items = [_drawn(item, rng, device) for item in inputs[kind]]
    return dict(zip(inputs["keys"], items, strict=True)) if kind == "dict" else tuple(items) if kind == "tuple" else items
