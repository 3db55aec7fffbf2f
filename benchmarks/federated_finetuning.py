"""Federated fine-tuning of a network that was trained: do personal patterns pay where an ordered prefix is chance?

    python benchmarks/federated_finetuning.py --out finetuning [--methods fedlps-fisher heterofl] [--seeds 0 1 2]

EfficientNet-Lite0 with its weights of ImageNet; clients hold 20 of the 200 classes of Tiny ImageNet each, capabilities from 1
to 1/16. A run continues where it ended; its scores go to OUT/finetuning.jsonl.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow.parquet as parquet
import torch
from common import add, read
from efficientnet_lite_pytorch import EfficientNet
from real_nets import DATA, efficientnet_lite0, images
from torch import nn

import sparsekit as sk
import sparsekit_fl as fl
from sparsekit.graph import UnitMask
from sparsekit.training import ImportanceRegularizer
from sparsekit_fl.client.packing import Kept

_BATCHES = 16  # that importance starts from


@dataclass(frozen=True, kw_only=True)
class FromOwnData(fl.methods.fedlps):
    """FedLPS whose importance starts from a criterion on a client's own first batches.

    Layers that read dropped units are also refitted, as for a network that was trained before. The client
    adds its refit to the received model and subtracts it from its upload, since the refit would harm clients that keep other
    units. The regularizer would pull importance to magnitudes, so `strength` is 0.

    Args:
        criterion: Computes the first importance, "fisher" or "wanda".
    """

    criterion: str = "fisher"
    strength: float = 0.0
    ratios: str = "capability"

    def train(self, client: fl.ClientContext, task: fl.Task) -> fl.Result:
        """Train from the refitted model."""
        if "refit" not in client.memory:
            self._begin(client, task)
        refit = client.memory["refit"]
        state = {**task.state, **{name: task.state[name] + change.to(task.state[name]) for name, change in refit.items()}}
        result = super().train(client, replace(task, state=state))
        kept, sent = Kept(client.graph, result.mask if isinstance(result.mask, UnitMask) else None), dict(result.state)
        trained = dict(client.masked.named_weights())
        for name, change in refit.items():
            own, received = kept.gather(name, change).to(sent[name]), kept.gather(name, task.state[name]).to(sent[name])
            sent[name] = sent[name] - own if name in trained else received  # statistics go back as they came
        return replace(result, state=sent)

    def _begin(self, client: fl.ClientContext, task: fl.Task) -> None:
        """Put importance from the client's first batches into its memory, and how the refit of its submodel changes weights."""
        (batches,) = ([(*each.inputs, each.targets) for each in islice(epoch, _BATCHES)] for epoch in client.batches(epochs=1))
        client.load(task.state, None)
        pruned = sk.prune(
            client.masked.compact(),
            client.problem.example_inputs,
            batches=batches,
            loss=client.problem.loss,
            criterion=self.criterion,
            allocation=partial(sk.allocation.by_ratio, ratios=task.ratio),
            graph=client.graph,
            multiple_of=1,
        )
        # Three passes for gradients, and one to refit.
        client.scored.append(4 * sum(len(batch[-1]) for batch in batches) * client.costs.forward_flops(None))
        (found,) = pruned.scores.values()
        scores = torch.cat([found.values[name].float() for name in client.graph.groups])
        term, sizes = ImportanceRegularizer(target="standardized"), [group.size for group in client.graph.groups.values()]
        client.memory["importance"] = term.targets(scores, sizes).cpu()
        refitted = sk.expand(pruned.model.state_dict(), client.graph, pruned.mask, into=task.state)
        changes = {name: refitted[name].cpu() - value.cpu() for name, value in task.state.items() if value.is_floating_point()}
        client.memory["refit"] = {
            name: change for name, change in changes.items() if name not in client.frozen and change.any()
        }


METHODS: dict[str, fl.Method] = {
    "fedlps-fisher": FromOwnData(criterion="fisher"),
    # Its scaler suits norms that train; a step of its clipped gradients would be a hundred times shorter than that of others.
    "heterofl": fl.methods.heterofl(scaler=False, clip=None),
    "fedlps": fl.methods.fedlps(ratios="capability"),
    "fedlps-random": fl.methods.fedlps_random(ratios="capability"),
    "fedavg": fl.methods.fedavg(),
    "local": fl.methods.local(),
    "fedlps-wanda": FromOwnData(criterion="wanda"),
    "fedrolex": fl.methods.fedrolex(),
    "fedlps-magnitude": fl.methods.fedlps_magnitude(ratios="capability"),
    "fedlps-ordered": fl.methods.fedlps_ordered(ratios="capability"),
    "fedper": fl.methods.fedper(),
}


class KeptNorm(nn.BatchNorm2d):
    """A batch norm that trains with its running statistics, which only `recalibrate_batchnorm` replaces."""

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode, except while statistics are estimated."""
        return super().train(mode and self.momentum is None)


def with_kept_norms(model: nn.Module) -> nn.Module:
    """Let the batch norms of a model train with their running statistics."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = KeptNorm
    return model


def clients(count: int, classes: int, images_each: int, pixels: int, seed: int) -> list[fl.Client]:
    """Clients of some classes each, with as many images of each class: four fifths train, a tenth validates, a tenth tests."""
    labels = np.array(parquet.read_table(DATA / "tiny_imagenet" / "train.parquet")["label"].to_pylist())
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(200) for _ in range(-(-count * classes // 200))])
    owners = order[: count * classes].reshape(count, classes)
    rows = {label: list(rng.permutation(np.flatnonzero(labels == label))) for label in range(200)}
    shared = {label: max(1, int((owners == label).sum())) for label in range(200)}
    size = {label: len(rows[label]) // shared[label] for label in range(200)}
    found = []
    for id, own in enumerate(owners):
        mine = [[rows[label].pop() for _ in range(min(size[label], images_each // classes))] for label in own]
        parts = ([], [], [])  # type: tuple[list[int], list[int], list[int]]
        for each in mine:
            held = max(1, len(each) // 10)
            for part, some in zip(parts, (each[2 * held :], each[:held], each[held : 2 * held]), strict=True):
                part.extend(int(row) for row in some)
        data = [fl.TensorData(*images("train", part, pixels)) for part in parts]
        found.append(fl.Client(id=id, data=fl.ClientData(*data)))
    return found


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("finetuning"))
    parser.add_argument("--methods", nargs="*", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--seeds", type=int, nargs="*", default=(0,))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--images", type=int, default=1000, help="of a client, before they are divided")
    parser.add_argument("--cohort", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pixels", type=int, default=96)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--norms", choices=("kept", "trained"), default="kept")
    parser.add_argument("--validation", action="store_true", help="score on validation data, to choose a recipe")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(exist_ok=True)
    path = options.out / "finetuning.jsonl"
    trained = efficientnet_lite0(options.pixels).model
    about = {
        name: getattr(options, name)
        for name in ("clients", "classes", "images", "cohort", "rounds", "pixels", "lr", "norms", "validation")
    }

    def model() -> torch.nn.Module:
        fresh = EfficientNet.from_name("efficientnet-lite0")
        fresh._fc = torch.nn.Linear(fresh._fc.in_features, 200)
        return with_kept_norms(fresh) if options.norms == "kept" else fresh

    example = (torch.zeros(2, 3, options.pixels, options.pixels),)
    problem = fl.Problem(model=model, example_inputs=example, channels_last=True)
    for seed in options.seeds:
        everyone = clients(options.clients, options.classes, options.images, options.pixels, seed)
        if options.validation:
            everyone = [fl.Client(id=c.id, data=fl.ClientData(c.data.train, c.data.val, c.data.val)) for c in everyone]
        tests = [client.data.test for client in everyone]
        with torch.no_grad():
            right = [float((trained(*test.inputs).argmax(1) == test.targets).float().mean()) for test in tests]
        print(f"seed {seed}: {np.mean(right):.4f} with the weights as they come")
        for name in options.methods:
            key: dict[str, Any] = {"method": name, "seed": seed, **about}
            if any(key == {each: row[each] for each in key} for row in read(path)):
                continue
            training = fl.TrainingConfig(local_epochs=1, batch_size=32, lr=options.lr)
            levels = tuple(1 / 2**power for power in range(5))
            config = fl.RunConfig(
                rounds=options.rounds,
                cohort=options.cohort,
                seed=seed,
                eval_every=options.rounds,
                capability_levels=levels,
                training=training,
            )
            others = ("images", "pixels", "lr", "norms", "validation", "rounds")
            folder = options.out / "-".join(map(str, (name, seed, *(about[other] for other in others))))
            resume = (folder / "checkpoint.state").exists()
            result = fl.run(METHODS[name], problem, everyone, config, out=folder, resume=resume, init=trained.state_dict())
            row = {**key, "personal": dict(result.final.personal), "flops": result.cost.flops}
            add(path, row)


if __name__ == "__main__":
    main()
