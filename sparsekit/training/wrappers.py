"""What wraps a learnable mask: some wrappers of torch need help, others cannot work, or would train or average it wrong.

torch calls a global hook when a module becomes a part of another one, which is where wrappers are met.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from sparsekit.errors import UnsupportedModelError
from sparsekit.tracing.blocks import refuse_meta

EXPORT_INSTEAD = (
    "a LearnableMask cannot be exported, since its mask may still change; export what it has become:"
    " torch.onnx.export(masked.compact().eval(), ...), and likewise torch.export, torch.jit.trace and torch.jit.script"
)
"""What to say to exporters, each of which ends somewhere else."""


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be trained under a mask: no module, one without values, or one with a parallel wrapper inside, which
    holds on to the weights that it was made with.

    Raises:
        UnsupportedModelError: it is not a model, is on the meta device, or has a DataParallel or DistributedDataParallel.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, got {model!r}; pass the model itself")
    refuse_meta(model, "LearnableMask")
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel | DistributedDataParallel):
            inner = f"{name}.module".strip(".")
            raise UnsupportedModelError(
                f"a learnable mask replaces weights at every call, which {type(module).__name__} does not allow;"
                f" wrap what is inside of it, model.{inner}"
            )


@functools.cache
def guard_wrappers(kind: type[nn.Module]) -> None:
    """Meet every wrapper of learnable masks, which are of `kind`."""
    register_module_module_registration_hook(functools.partial(_meet, kind))


def _meet(kind: type[nn.Module], wrapper: nn.Module, _name: str, module: nn.Module | None) -> None:
    if isinstance(wrapper, AveragedModel | DistributedDataParallel) and module is not None:
        for part in module.modules():
            if isinstance(part, kind):
                if isinstance(wrapper, AveragedModel):
                    raise UnsupportedModelError(
                        "AveragedModel averages by place, where a learnable mask holds other units after every change of its"
                        " mask; use average = sparsekit.MovingAverage(masked), average.update() after each step and"
                        " average.compact() at the end"
                    )
                _join(wrapper, part)


def _join(wrapper: DistributedDataParallel, masked: Any) -> None:
    """Give every rank the state of the first one, and refuse to train on after a change of shape."""
    _broadcast(masked, wrapper.process_group)
    masked.distributed = True
    before = [weight.shape for weight in masked.weights()]

    def check(*_: Any) -> None:
        masked.unit_mask()
        if [weight.shape for weight in masked.weights()] != before:
            raise UnsupportedModelError(
                "the shapes of the learnable mask's parameters changed (another ratio?) after it was wrapped in"
                " DistributedDataParallel, which would no longer average their gradients; wrap it again:"
                " ddp = DistributedDataParallel(masked)"
            )

    wrapper.register_forward_pre_hook(check)


def _broadcast(masked: Any, group: Any) -> None:
    """Load the first rank's state on all that differ: DistributedDataParallel itself broadcasts the narrow entries alone.

    Buffers do not count as a difference: it broadcasts those before every pass.
    """
    distributed = torch.distributed
    source = distributed.get_global_rank(group, 0)
    state = masked.state_dict()
    names = sorted(masked.dense_state())
    dense = {name: state.pop(name).contiguous() for name in names}
    own = {name: value.cpu() for name, value in state.items()}
    box: list[Any] = [own]
    distributed.broadcast_object_list(box, src=source, group=group)
    first: dict[str, Tensor] = {}
    for name in names:
        first[name] = dense[name].clone()
        distributed.broadcast(first[name], src=source, group=group)
    buffers = {name for name, _ in masked.model.named_buffers(remove_duplicate=False)}
    same = own.keys() == box[0].keys() and all(torch.equal(value, box[0][name]) for name, value in own.items())
    if not same or any(not torch.equal(dense[name], first[name]) for name in names if name not in buffers):
        masked.load_state_dict({**first, **box[0]})
