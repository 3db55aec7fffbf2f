"""Sweep: scores and refits the blocks of a decoder on calibration data, with the weights of one block in memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.criteria import Criterion, Fisher, ScoringContext, Taylor, Wanda, with_data
from sparsekit.criteria.base import score_units
from sparsekit.criteria.batches import Batch
from sparsekit.errors import UnsupportedModelError
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.graph.edit import inside, only
from sparsekit.progress import track
from sparsekit.pruning.calibration import Calibration
from sparsekit.pruning.sequence import Others, Refit, find_chain, first_of, lossy_layers, note_calls, run_block
from sparsekit.surgery.rebuild import find_constants, narrow_block
from sparsekit.tracing.modes import scoring
from sparsekit.transformers.weights import filled

SWEPT = (Wanda, Fisher, Taylor)
"""Criteria with data that a sweep can score by: on the inputs of a block, or on these and the gradients of its outputs."""
_INSTEAD = "leave out batches=, or load the model and call sparsekit.prune"


class Sweep:
    """Runs the blocks of a decoder one after the other, on the hidden states after the block before, which are in a file.

    There is a hidden state for each batch. Those of the batches to fit are "dense", of the dense model, and "cut", of the
    refitted one. Those of the held-out batches are "judge", of the dense model, "bare", of the cut one, and "refit".

    Args:
        twin: The dense model on the meta device.
        graph: Its units.
        weights: Name → tensor.
        calibration: Batches to fit, and to judge.
        file: The file. An interrupted call continues after the last block in it.
        of: What identifies model, data and criterion.
        progress: As for `prune`.

    Raises:
        UnsupportedModelError: The units are not all inside a list of equal blocks that follow one another.
    """

    def __init__(
        self, twin: nn.Module, graph: UnitGraph, weights: Mapping[str, Tensor], calibration: Calibration, file: Path,
        of: str, *, progress: bool | None,
    ) -> None:  # fmt: skip
        self.twin, self.graph, self.weights, self.calibration = twin, graph, weights, calibration
        self.file, self._progress = file, progress
        self.chain = _find_blocks(twin, graph)
        self._blocks = [twin.get_submodule(name) for name in self.chain]
        self._in_tuple, self._count = False, len(calibration.fit)
        states = self._enter([*calibration.fit, *calibration.judge])
        self._first = {"dense": states[: self._count], "judge": states[self._count :]}
        self._state: dict[str, Any] = {
            "of": of,
            "plan": "",
            "place": 0,
            "scores": {},
            "streams": {"dense": self._first["dense"]},
        }
        if file.exists() and (found := torch.load(file, mmap=True, weights_only=True))["of"] == of:
            self._state = found

    def scores(self, criterion: Wanda | Fisher | Taylor) -> dict[str, Tensor]:
        """Return the scores of all units.

        Each block is scored on the inputs that it gets in the dense model. Gradients need a sweep forward, which keeps the
        inputs of all blocks in files, and one backward, in which a block passes on the gradients of its inputs.
        """
        if isinstance(criterion, Fisher | Taylor):
            return self._gradient_scores(criterion)
        for place in self._places("Scoring blocks") if not self._state["plan"] else ():
            states = self._state["streams"]["dense"]
            batches = [Batch((x, *args), kwargs) for x, (args, kwargs) in zip(states, self._others_of(place, 0))]
            with filled(block := self._blocks[place], f"{self.chain[place]}.", self.weights):
                scores = self._score(place, with_data(criterion, batches, None))
                after = self._pass(block, place, states)
            self._save(place=place + 1, scores=self._state["scores"] | scores, streams={"dense": after})
        return {name: self._state["scores"][name] for name in self.graph.groups}

    def _score(self, place: int, criterion: Criterion) -> dict[str, Tensor]:
        """Return the scores of the units of a block that has its weights."""
        name, block = self.chain[place], self._blocks[place]
        own = [each for each, group in self.graph.groups.items() if group.slices[0].name.startswith(f"{name}.")]
        context = ScoringContext(model=block, weights=block.state_dict())
        return score_units(criterion, inside(only(self.graph, own), name), context) if own else {}

    def _gradient_scores(self, criterion: Fisher | Taylor) -> dict[str, Tensor]:
        limited: Any = with_data(criterion, [], None)
        limit, last = limited.limit, len(self.chain)
        files = [self.file.with_name(f"{self.file.name}-{place}") for place in range(last)]
        for place in self._places("Running blocks") if not self._state["plan"] else ():
            states = self._state["streams"]["dense"][:limit]
            with filled(self._blocks[place], f"{self.chain[place]}.", self.weights):
                after = self._pass(self._blocks[place], place, states)
            _write(states, files[place])
            self._save(place=place + 1, streams={"dense": after})
        if "above" not in self._state:
            self._save(above=last, streams={"gradients": self._gradients(criterion, self._state["streams"]["dense"])})
        for place in track(range(self._state["above"] - 1, -1, -1), "Scoring blocks", show=self._progress):
            found: list[Tensor] = []

            def pull(out: Any, target: tuple[Tensor, Tensor], found: list[Tensor] = found) -> Tensor:
                state, gradient = target
                out = first_of(out)
                found.extend(torch.autograd.grad(out, state, gradient, retain_graph=True))
                loss: Tensor = (out * gradient).sum()  # has the gradients of the loss of the whole model
                return loss

            states = [state.detach().requires_grad_() for state in torch.load(files[place], mmap=True, weights_only=True)]
            given = zip(states, self._others_of(place, 0), self._state["streams"]["gradients"])
            batches = [Batch((state, *args), kwargs, (state, gradient)) for state, (args, kwargs), gradient in given]
            with filled(self._blocks[place], f"{self.chain[place]}.", self.weights):
                scores = self._score(place, replace(criterion, batches=batches, loss=pull))
            self._save(above=place, scores=self._state["scores"] | scores, streams={"gradients": found})
        for file in files:
            file.unlink(missing_ok=True)
        return {name: self._state["scores"][name] for name in self.graph.groups}

    def _gradients(self, criterion: Fisher | Taylor, states: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the loss with respect to the hidden states after the last block."""
        found: list[Tensor] = []
        with filled(self.twin, "", self.weights, but=self.chain), self._bridged() as ends, scoring(self.twin):
            loss = criterion.loss or self.calibration.of(self.twin, ()).gradient_loss
            for batch, state in zip(self.calibration.fit, states):
                ends[:] = [state := state.detach().requires_grad_()]
                found.extend(torch.autograd.grad(batch.loss(self.twin, loss), state))
        return found

    def refit(
        self, mask: UnitMask, plan: str, write: Callable[[str, nn.Module], None], written: Callable[[str], bool]
    ) -> dict[str, float]:
        """Cut each block and refit it on the inputs that it gets after the refitted ones, as `reconstruct` does.

        Args:
            mask: The units that stay.
            plan: What identifies them. If the file is of another plan, the first block is the next one.
            write: Called with the name of a block and the block, narrow and refitted.
            written: Returns whether that was done for a block, by name. If one is lost, the first block is the next one.

        Returns:
            Name of each layer → share of the error in its outputs that is left.
        """
        refit = Refit(self.twin, self.twin, self.graph, mask)
        lost = not self._state.get("undone") and not all(map(written, self.chain[: self._state["place"]]))
        if self._state["plan"] != plan or lost:
            streams = {"dense": self._first["dense"], "cut": self._first["dense"]}
            streams |= dict.fromkeys(("judge", "bare", "refit"), self._first["judge"])
            drawn = refit.generator.get_state()
            self._save(plan=plan, place=0, streams=streams, left={}, drawn=drawn, losses=None, undone=False)
        refit.generator.set_state(self._state["drawn"])
        examples = [batch.examples for batch in self.calibration.fit]
        for place in self._places("Reconstructing blocks"):
            name, block, now = self.chain[place], self._blocks[place], self._state["streams"]
            others = [(each, each) for each in self._others_of(place, 0)]
            with filled(block, f"{name}.", self.weights):
                small = narrow_block(self.twin, self.graph, mask, name)
                after = {"judge": self._pass(block, place, now["judge"], held=True)}
                after["bare"] = self._pass(small, place, now["bare"], held=True)
                with _running(block), _running(small):
                    dense, cut, left = refit.refit_block(name, block, small, now["dense"], now["cut"], others, examples)
            after |= {"dense": dense, "cut": cut, "refit": self._pass(small, place, now["refit"], held=True)}
            write(name, small)
            left = self._state["left"] | left
            self._save(place=place + 1, streams=after, left=left, drawn=refit.generator.get_state())
        found: dict[str, float] = self._state["left"]
        return found

    def losses(self) -> dict[str, float]:
        """Return the losses of the dense model, of the cut one and of the refitted one on the held-out examples."""
        found: dict[str, float] = self._state["losses"] or {}
        if found or not self.calibration.judge:
            return found
        streams = self._state["streams"]
        with filled(self.twin, "", self.weights, but=self.chain), self._bridged() as ends:
            asked = self.calibration.loss is None and self.calibration.fit[0].target is None  # by a pass, for a loss
            ends.extend([*streams["judge"][:asked], *streams["judge"]])
            calibration = self.calibration.of(self.twin, self.calibration.judge)
            for name in ("judge", "bare", "refit"):
                ends[:] = streams[name]
                found[name] = calibration.measure(self.twin)
        self._save(losses=found)
        return found

    def undo(self, remove: Callable[[], None]) -> None:
        """Call `remove`, which removes the refitted blocks, unless an earlier call has done so."""
        if not self._state["undone"]:
            remove()
            self._save(undone=True)

    def _enter(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the hidden states before the first block, and keep the other arguments of all blocks."""
        base: Any = self.twin.base_model
        prefix = next(f"{name}." if name else "" for name, module in self.twin.named_modules() if module is base)
        with filled(base, prefix, self.weights, but=[name.removeprefix(prefix) for name in self.chain]), _running(base):
            if bare := [name for name, (_, tensor) in find_constants(base).items() if tensor.is_meta]:
                raise UnsupportedModelError(f"{type(base).__name__} holds {bare[0]!r}, which no file has; {_INSTEAD}")
            for self._in_tuple in (False, True):
                with self._bridged():
                    calls = note_calls(base, self._blocks, batches, sys.maxsize)
                if calls is not None:
                    self._others = calls.others
                    return calls.hidden
        raise UnsupportedModelError(f"the blocks of {type(base).__name__} do not follow one another; {_INSTEAD}")

    @contextmanager
    def _bridged(self) -> Iterator[list[Tensor]]:
        """Let every block return its input, and the last one the tensors of the list in turn, as long as there are any."""
        ends: list[Tensor] = []

        def passed(last: bool, state: Tensor, *_: Any, **__: Any) -> Any:
            state = ends.pop(0) if last and ends else state
            return (state,) if self._in_tuple else state

        with ExitStack() as stack:
            for block in self._blocks:
                stack.callback(vars(block).pop, "forward")
                block.forward = lambda *args, last=block is self._blocks[-1], **kwargs: passed(last, *args, **kwargs)
            yield ends

    def _others_of(self, place: int, first: int) -> list[Others]:
        """Return the other arguments of a block for the batches to fit, or from the batch `first` on."""
        return [others[place] for others in (self._others[first:] if first else self._others[: self._count])]

    def _pass(self, block: nn.Module, place: int, states: Sequence[Tensor], *, held: bool = False) -> list[Tensor]:
        """Return what a block makes of the hidden states of the batches to fit, or of the held-out ones."""
        with _running(block):
            others = self._others_of(place, self._count if held else 0)
            return [run_block(block, state, other)[0] for state, other in zip(states, others)]

    def _places(self, what: str) -> Iterator[int]:
        return track(range(self._state["place"], len(self.chain)), what, show=self._progress)

    def _save(self, **changes: Any) -> None:
        """Write the state with some changes, and map it into memory."""
        _write(self._state | changes, self.file)
        self._state = torch.load(self.file, mmap=True, weights_only=True)


def _write(value: Any, file: Path) -> None:
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        torch.save(value, temporary)
        temporary.replace(file)
    except RuntimeError as error:  # which torch raises where it cannot write
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _running(module: nn.Module) -> Iterator[None]:
    with scoring(module), torch.no_grad():
        yield


def _find_blocks(twin: nn.Module, graph: UnitGraph) -> list[str]:
    """Return the names of the blocks that have all units."""
    least = UnitMask({name: torch.arange(group.size) < group.rounded(1) for name, group in graph.groups.items()})
    chain = find_chain(twin, lossy_layers(twin, graph, least))
    for name, group in graph.groups.items():
        homes = [each for each in chain if group.slices[0].name.startswith(f"{each}.")]
        if not homes or not all(piece.name.startswith(f"{homes[0]}.") for piece in group.slices):
            raise UnsupportedModelError(
                f"with data, a folder is pruned block by block, and group {name!r} of this {type(twin).__name__} is not inside"
                f" of one of several equal blocks with linear layers; {_INSTEAD}"
            )
    return chain
