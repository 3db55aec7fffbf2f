"""NormSite, kept_norms(): norms over kept units only, so that a dense model under a mask equals the narrow one.

A layer norm over 512 features of which 128 are kept is, in the narrow model, a norm over 128 numbers. For the dense model
under the same mask to be the same function, its norm has to leave the dropped features out of its statistics. That is what
norm="kept" means, and this file is the one place that says how it is done.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit.errors import TraceError
from sparsekit.surgery.norm_calls import NormCall, read_norm_call

if TYPE_CHECKING:
    from sparsekit.graph.graph import UnitGraph


class NormMode(TorchFunctionMode):
    """Intercept every averaging call of a model, with the name of its module and its number within that module."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: list[tuple[str, list[int]]] = []
        self._patched: list[tuple[nn.Module, Any]] = []

    @abstractmethod
    def meet(self, module: str, number: int, call: NormCall, plain: Callable[[], Any]) -> Any:
        """Compute an averaging call; `plain()` computes it as it stands."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = read_norm_call(func, args, kwargs) if self._frames else None
        if call is None:
            return func(*args, **kwargs)
        module, counter = self._frames[-1]
        counter[0] += 1
        return self.meet(module, counter[0] - 1, call, lambda: func(*args, **kwargs))

    def patch(self, module: nn.Module, name: str) -> None:
        """Intercept the calls in every forward pass of `module`, a private copy, under its name."""
        before = module.__dict__.get("forward")
        self._patched.append((module, before))
        object.__setattr__(module, "forward", functools.partial(_framed, self, name, module, before))

    def unpatch(self) -> None:
        """Undo every `patch`."""
        for module, before in reversed(self._patched):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                object.__setattr__(module, "forward", before)
        self._patched = []


def _framed(mode: NormMode, name: str, module: nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    mode._frames.append((name, [0]))
    try:
        with mode if len(mode._frames) == 1 else nullcontext():
            return type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)
    finally:
        mode._frames.pop()


# In inference these hand their weights to one fused kernel, past the modules inside, unless such a mode is active.
_FUSED = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


class KeptNorms(NormMode):
    """Let the norms of a dense module, a private copy, leave out dropped units. The mask can change between passes.

    Modules are patched once, since checkpointed parts run again in the backward pass, where no context is active.
    """

    def __init__(self, model: nn.Module, graph: UnitGraph) -> None:
        super().__init__()
        self._sites = {(site.module, site.call): site for site in graph.norms}
        self._kept: dict[tuple[str, int], tuple[int, Tensor]] = {}  # size and positions, of norms that leave something out
        owners = {site.module for site in graph.norms}
        names = dict(model.named_modules())
        roots = [
            name
            for name, module in names.items()
            if name in owners or (isinstance(module, _FUSED) and any(_inside(owner, name) for owner in owners))
        ]
        for name, module in names.items():
            # What runs inside an owner has calls of its own, which are not the owner's.
            if any(_inside(name, root) for root in roots):
                self.patch(module, name)

    def set_mask(self, keep: Mapping[str, Tensor], within: Mapping[str, Tensor] | None = None, *, device: torch.device) -> None:
        """Set what is kept, group name → bool (units,), of the units that the model has: `within` if it is not dense."""
        found = {key: site.stays(keep) for key, site in self._sites.items()}
        if within is not None:
            found = {key: stays[self._sites[key].stays(within)] for key, stays in found.items()}
        # Asked and copied here: at each call, a device would have to be waited for.
        self._kept = {
            key: (stays.numel(), stays.nonzero().reshape(-1).to(device))
            for key, stays in found.items()
            if not bool(stays.all())
        }

    def meet(self, module: str, number: int, call: NormCall, plain: Callable[[], Any]) -> Any:
        """Compute over the kept positions where units were traced, else plainly."""
        if (module, number) not in self._kept:
            return plain()
        site, (size, kept) = self._sites[module, number], self._kept[module, number]
        dim = call.x.dim() + site.dim
        if call.name != site.function or dim not in call.dims or call.x.shape[dim] != size:
            raise TraceError(
                f"{module or 'the model'} calls {call.name} on {tuple(call.x.shape)} where it called {site.function} over"
                f" {size} positions when its units were traced; trace it on inputs that take the same path"
            )
        # A copy only where the model is on several devices.
        return call.over(dim, kept.to(call.x.device))


def _inside(name: str, root: str) -> bool:
    return name == root or not root or name.startswith(f"{root}.")


@contextmanager
def kept_norms(model: nn.Module, graph: UnitGraph, keep: Mapping[str, Tensor]) -> Iterator[None]:
    """Run `model`, dense and with its dropped units gated, so that it equals the narrow model. It is changed inside only.

    `keep`: group name → bool (units,). With a graph that was traced with norm="fixed" nothing changes.
    """
    if not graph.norms:
        yield
        return
    norms = KeptNorms(model, graph)
    norms.set_mask(keep, device=next((tensor.device for tensor in model.parameters()), torch.device("cpu")))
    try:
        yield
    finally:
        norms.unpatch()
