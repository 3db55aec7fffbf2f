"""Run one cell: train a learnable mask through a change, beside its reference, and measure how far they come apart.

The reference is the oracle of masked dense training with plain loops, neither compiled nor resumed nor scaled. Means over
rows and blocks of weights are others where dropped entries lie among them: Adafactor and AdamW8bit have a narrow reference.
"""

import importlib
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from masked import learnable_mask, shake
from torch import Tensor, nn

from sparsekit import LearnableMask
from sparsekit.training import GradientImportance

OPTIMIZERS = (
    "SGD", "SGD foreach", "SGD fused", "Adam", "Adam foreach", "Adam fused", "AdamW", "AdamW foreach", "AdamW fused",
    "Adafactor", "Adafactor foreach", "RMSprop", "RMSprop foreach", "LBFGS", "AdamW8bit",
)  # fmt: skip
PRECISIONS = ("float32", "bfloat16", "autocast bfloat16", "autocast float16", "float64")
CHANGES = ("mask", "ratio", "resume")
COMPILED = (("Adam fused", "bfloat16"), ("AdamW8bit", "float32"))


@dataclass(frozen=True)
class Cell:
    """One combination; "resume" saves and loads mask and optimizer between two changes of the mask."""

    optimizer: str
    precision: str
    change: str
    compiler: str = ""

    def __str__(self) -> str:
        return "-".join(value.replace(" ", "_") for value in astuple(self))

    @property
    def kind(self) -> str:
        return self.optimizer.partition(" ")[0]

    @property
    def implementation(self) -> str:
        return self.optimizer.partition(" ")[2]


def expected(cell: Cell) -> str:
    """Return "equal", or why not: part of the error that must come."""
    if cell.kind == "LBFGS" and cell.precision == "autocast float16":
        return "Closure use is not currently supported"  # by torch's GradScaler
    if cell.kind == "LBFGS" and cell.change != "resume":
        return "LBFGS keeps a history of whole steps"
    return "equal"


def all_cells() -> list[Cell]:
    """All combinations without a compiler, but for what torch itself has wrong."""
    # On a CPU, torch 2.13 leaves most entries as they are in this case; no error comes.
    broken = ("SGD fused", "bfloat16")
    return [Cell(*values) for values in product(OPTIMIZERS, PRECISIONS, CHANGES) if values[:2] != broken]


def cells(compiler: str = "") -> list[Cell]:
    """Every optimizer in every precision, each through one of the changes; with a compiler two optimizers, in one each."""
    found = [cell for cell in all_cells() if (OPTIMIZERS.index(cell.optimizer) + PRECISIONS.index(cell.precision)) % 3
             == CHANGES.index(cell.change)]  # fmt: skip
    if not compiler:
        return found
    return [Cell(*astuple(cell)[:3], compiler) for cell in found if (cell.optimizer, cell.precision) in COMPILED]


TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.03, "autocast bfloat16": 0.02, "autocast float16": 0.01}
"""Largest distance from the reference, over the way that training has gone."""

STEPS = 7
CHANGES_AT = (2, 4)
RESUMES_AT = 3
OVERFLOWS_AT = 5


def _model(cell: Cell, device: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if cell.kind == "AdamW8bit":
            model = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 3))
            x = torch.randn(12, 16)
        else:
            layers = (nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Conv2d(8, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 4, 3))
            model, x = nn.Sequential(*layers), torch.randn(12, 2, 6, 6)
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(cell.precision, torch.float32)
    return model.to(device, dtype), x.to(device, dtype)


SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    "Adam": {"lr": 0.02, "eps": 1e-2, "weight_decay": 1e-3},
    "AdamW": {"lr": 0.02, "eps": 1e-2, "weight_decay": 1e-3},
    "RMSprop": {"lr": 0.005, "eps": 1e-2, "momentum": 0.5},
    "Adafactor": {"lr": 0.05},
    "LBFGS": {"lr": 0.1, "max_iter": 2},
    "AdamW8bit": {"lr": 0.02, "eps": 1e-2, "block_size": 256},
}


def _optimizer(cell: Cell, weights: list[nn.Parameter], *, plain: bool) -> torch.optim.Optimizer:
    loop = {cell.implementation: True} if cell.implementation and not plain else {"foreach": False}
    if cell.kind in ("LBFGS", "AdamW8bit"):
        loop = {}
    home = importlib.import_module("torchao.optim" if cell.kind == "AdamW8bit" else "torch.optim")
    return getattr(home, cell.kind)(weights, **{**SETTINGS[cell.kind], **loop})


def _learns(cell: Cell) -> bool:
    return not (cell.kind == "LBFGS" and cell.change == "resume")


def _autocast(cell: Cell, device: str) -> AbstractContextManager[Any]:
    kind, _, name = cell.precision.partition(" ")
    return torch.autocast(torch.device(device).type, getattr(torch, name)) if kind == "autocast" else nullcontext()


def _masked(cell: Cell, device: str, *, plain: bool = False) -> LearnableMask:
    model, x = _model(cell, device)
    if cell.compiler and not plain:
        model = torch.compile(model, backend=cell.compiler)
    execution = "masked" if plain and cell.kind not in ("Adafactor", "AdamW8bit") else "compact"
    # A small rate, so that the order of importance changes where the cell says and nowhere else.
    rule = GradientImportance(lr=1e-4, refresh_every=1) if _learns(cell) else None
    return learnable_mask(model, (x,), ratio=0.5, execution=execution, learning=rule)


def distance(cell: Cell, *, device: str = "cpu", after_step: Callable[..., None] = lambda _: None) -> float:
    """Train both through the change; returns by how much weights differ, as a share of what training has changed.

    `after_step` is called with the learnable mask after each of its steps; a test breaks something in it.
    """
    masked, reference = _masked(cell, device), _masked(cell, device, plain=True)
    optimizer, plain = (_optimizer(cell, mask.parameters(), plain=mask is reference) for mask in (masked, reference))
    _, x = _model(cell, device)
    first = reference.dense_state()
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=1024.0) if "float16" in cell.precision.split() else None
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        batch = torch.randn(x.shape, generator=generator).to(x)
        target = torch.randint(3, (x.shape[0],), generator=generator).to(device)
        scale = float("inf") if scaler is not None and step == OVERFLOWS_AT else 1.0

        def loss(run: Callable[..., Tensor], batch: Tensor = batch, target: Tensor = target) -> Tensor:
            with _autocast(cell, device):
                outputs = run(batch)
            return F.cross_entropy(outputs.float() if outputs.dtype.itemsize < 4 else outputs, target)

        if _learns(cell) and (step == 0 or (step in CHANGES_AT and cell.change != "ratio")):
            for mask in (masked, reference):
                shake(mask, step)
        if step in CHANGES_AT and cell.change == "ratio":
            masked.ratio = reference.ratio = (0.25, 0.75)[CHANGES_AT.index(step)]
        elif step == CHANGES_AT[0] and not _learns(cell) and cell.change != "resume":
            masked.ratio = 0.25
        if step == RESUMES_AT and cell.change == "resume":
            masked, optimizer = _resumed(cell, masked, optimizer, device)
        _step(masked, optimizer, scaler, loss, scale)
        after_step(masked)
        if scale == 1.0:
            with torch.compiler.set_stance("force_eager"):  # torchao compiles the step of every shape, which takes long
                _step(reference, plain, None, loss, 1.0)
        assert masked.unit_mask() == reference.unit_mask()
    found = {name.removeprefix("_orig_mod."): tensor for name, tensor in masked.dense_state().items()}
    dense = reference.dense_state()
    apart, way = (
        sum(float((other[name].double() - dense[name].double()).square().sum()) for name in first) for other in (found, first)
    )
    return float((apart / way) ** 0.5)


def _step(
    masked: LearnableMask, optimizer: torch.optim.Optimizer, scaler: Any, loss: Callable[..., Tensor], scale: float
) -> None:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        value = loss(masked) * scale
        (value if scaler is None else scaler.scale(value)).backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS) and scaler is None:
        optimizer.step(evaluate)
        return
    evaluate()
    if isinstance(optimizer, torch.optim.LBFGS):
        scaler.step(optimizer, closure=evaluate)
        return
    with torch.compiler.set_stance("force_eager"):
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


def _resumed(cell: Cell, masked: LearnableMask, optimizer: Any, device: str) -> tuple[LearnableMask, Any]:
    buffer = io.BytesIO()
    torch.save((masked.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, map_location="cpu", weights_only=True)
    masked = _masked(cell, device)
    optimizer = _optimizer(cell, masked.parameters(), plain=False)
    masked.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return masked, optimizer
