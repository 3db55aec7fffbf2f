"""A federated method of your own in one file: slow clients train a random half of the units. Seconds, offline.

Needs `pip install "sparsekit-torch[fl]"`. Run it with `python examples/new_method.py`, or by name, with every option of the
command line: `sparsekit run examples.new_method:fedhalf --rounds 10`. In a package of your own, the entry point

    [project.entry-points."sparsekit_fl.methods"]
    fedhalf = "mypackage.fedhalf:fedhalf"

makes it `sparsekit run fedhalf`.
"""

from dataclasses import dataclass

import sparsekit as sk
import sparsekit_fl as fl

ROUNDS = 10


@dataclass(frozen=True)
class HalfWhenSlow(fl.RatioPolicy):
    """The whole model, or half of it on a client below `threshold`."""

    threshold: float = 0.5

    def choose(self, ctx: fl.ClientContext, proposal: float | None) -> float:
        """The executed ratio; `ctx.capability` is what the device can do in this round."""
        return 1.0 if ctx.capability.ratio >= self.threshold else 0.5


def fedhalf(threshold: float = 0.5) -> fl.Method:
    """FedAvg but for three policies: how large, which units, and a mean over the clients that trained an entry."""
    return fl.Method(
        name="fedhalf",
        source="an example",
        ratio=HalfWhenSlow(threshold),
        mask=fl.policies.UnitCriterion(sk.criteria.Random()),
        aggregate=fl.policies.Mean("uniform", over="holders"),
    )


def main() -> None:
    """Run it beside FedAvg on scikit-learn's digits."""
    preset = fl.preset_for(dataset="digits")
    problem, clients = fl.build_problem(preset, seed=0)
    config = fl.RunConfig(
        rounds=ROUNDS,
        cohort=preset.cohort,
        training=preset.training,
        capability_levels=preset.capability_levels,
        capability="dynamic",
    )
    for method in (fedhalf(), fl.methods.fedavg()):
        result = fl.run(method, problem, clients, config)
        accuracy = result.final.metrics["accuracy"]
        print(f"{method.name:8} accuracy {accuracy:.1%} at {result.cost.flops / 1e9:.1f} GFLOPs")


if __name__ == "__main__":
    main()
