"""Checkpoint files of fine-tuning. They hold no code, and only the training that wrote one can resume from it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.surgery.files import hash_state

_PLAIN = (bool, int, float, str, type(None))


class CheckpointFile:
    """The checkpoint file of one training. `parts`: name → object with a state dict. Resuming requires equal `settings`."""

    def __init__(self, path: Path, parts: Mapping[str, Any], batches: Any, settings: Mapping[str, object]) -> None:
        if path.is_dir() or not path.parent.is_dir():
            raise InvalidValueError(f"checkpoint must be a file in a folder that exists, got {str(path)!r}")
        self.path, self._parts, self._batches = path, parts, batches
        self._owner = {"starting weights": hash_state(parts["model"].state_dict())}
        self._owner |= {name: str(value) for name, value in settings.items()}
        for name in ("optimizer", "scheduler"):
            if name in parts:
                self._owner |= _settings(name, parts[name])

    def save(self, progress: Mapping[str, Any]) -> None:
        """Write the state of all parts and random generators, and the progress: numbers, strings and tensors."""
        found = {
            "of": self._owner,
            "state": {name: part.state_dict() for name, part in self._parts.items()},
            "progress": dict(progress),
            "rng": torch.random.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "loader": [generator.get_state() for generator in _loader_generators(self._batches)],
        }
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            torch.save(found, temporary)
            if not self.path.exists():  # fail in the first epoch if the file cannot be read again
                _read(temporary)
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def load(self) -> dict[str, Any]:
        """Load the state of all parts, and return the progress.

        Raises:
            InvalidValueError: a damaged file, or one of another training. The message says what differs.
        """
        found = _read(self.path)
        again = "pass what it had, another file, or resume=False to overwrite it"
        if self._parts.keys() != found["state"].keys():
            had, has = ", ".join(found["state"]), ", ".join(self._parts)
            raise InvalidValueError(f"the checkpoint {self.path} is of a training with {had}, this one has {has}; {again}")
        theirs = dict(found["of"])
        averaged = {name.removeprefix("module."): value for name, value in found["state"].get("average", {}).items()}
        averaged.pop("n_averaged", None)
        ends = (found["state"]["model"], found["progress"]["best"][0] or {}, averaged)
        if self._owner["starting weights"] in map(hash_state, ends):
            theirs["starting weights"] = self._owner["starting weights"]  # the model was trained by the interrupted call
        differing = [
            name if name == "starting weights" else f"{name} is {self._owner.get(name)}, was {theirs.get(name)}"
            for name in self._owner | theirs
            if self._owner.get(name) != theirs.get(name)
        ]
        if "starting weights" in differing:
            states = self._parts["model"].state_dict(), found["state"]["model"]
            ours, given = (
                {name: value.shape for name, value in state.items() if isinstance(value, Tensor)} for state in states
            )
            if other := sorted(name for name in ours.keys() | given.keys() if ours.get(name) != given.get(name)):
                raise InvalidValueError(
                    f"the checkpoint {self.path} is of another model: {', '.join(other[:5])} differ; pass another file, or"
                    " resume=False to overwrite it"
                )
        if differing:
            raise InvalidValueError(
                f"the checkpoint {self.path} is of another training. What differs: {'; '.join(differing)}."
                f" {again[0].upper()}{again[1:]}"
            )
        for name, part in self._parts.items():
            part.load_state_dict(found["state"][name])
        torch.default_generator.set_state(found["rng"])
        if found["cuda"]:
            torch.cuda.set_rng_state_all(found["cuda"])
        for generator, state in zip(_loader_generators(self._batches), found["loader"]):
            generator.set_state(state)
        return dict(found["progress"])


def _settings(name: str, part: Any) -> dict[str, str]:
    """Return the class and the plain settings of an optimizer or a scheduler, before its first step."""
    state = part.state_dict()
    found = {name: type(part).__name__}
    if "param_groups" not in state:
        return found | _flat(name, state)
    for number, group in enumerate(state["param_groups"]):
        place = f"{name} group {number}" if len(state["param_groups"]) > 1 else name
        found |= _flat(place, {**group, "params": len(group["params"])})
    return found


def _flat(place: str, value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {key: found for name in value for key, found in _flat(f"{place} {name}", value[name]).items()}
    if isinstance(value, list | tuple):
        return {key: found for at, item in enumerate(value) for key, found in _flat(f"{place} {at}", item).items()}
    if isinstance(value, Tensor):
        return {place: str(value.tolist())}
    return {place: str(value)} if isinstance(value, _PLAIN) else {}


def _read(path: Path) -> dict[str, Any]:
    """Read tensors, bit for bit and to the CPU, numbers and strings. Loading runs no code."""
    with path.open("rb") as file:  # given a path, torch chooses the format by its ending
        try:
            return dict(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # damaged files fail in many ways
            raise InvalidValueError(
                f"{path} is damaged, or holds more than the state of a training made of numbers, strings and tensors:"
                f" {type(error).__name__}"
            ) from error


def _loader_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader, its sampler and its batch sampler draw from, each once; none for a list."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
