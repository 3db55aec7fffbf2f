"""FedAvg with client-level differential privacy: clipped changes, Gaussian noise, Poisson sampling, Opacus' accountant.

The released global models reveal little about whether a client, with all its data, took part. Run `python
examples/private_fedavg.py`, or by name: `sparsekit run examples/private_fedavg.py:PrivateFedAvg --set noise=1 --rounds 20`.
Needs `pip install -c constraints.txt ".[privacy]"` for ε.

What is *not* protected: losses, scores and cohorts in the result. Early stopping and the best checkpoint choose a model by such
scores, which have no noise, so they leak information: fix the number of rounds beforehand, and release the last model. The seed
of the noise is in the server's checkpoint, and anyone who has it can subtract the noise: keep checkpoints secret.
"""

import dataclasses
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

import sparsekit_fl as fl
from sparsekit.graph import StateDict
from sparsekit_fl.methods.base import moved

ROUNDS = 10

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class PrivateFedAvg(fl.Method):
    """FedAvg whose global models reveal little about any one client.

    The change of each client is scaled to norm `clip` at most, and all clients have equal weights. Gaussian noise of standard
    deviation `noise` · `clip` is added to the sum, which is divided by the *expected* number of clients, however many answered.

    Source: McMahan, Ramage, Talwar, Zhang, Learning Differentially Private Recurrent Language Models, ICLR 2018.
    """

    source: ClassVar[str] = "McMahan et al., ICLR 2018"

    clip: Positive = fl.option(1.0, "Largest norm C of a client's change, over all floating-point entries.")
    noise: Positive = fl.option(1.0, "Noise multiplier z, the standard deviation of the noise over C.")

    def sample(self, server: fl.ServerContext) -> list[int]:
        """Draw each client independently, so that the cohort has the configured size on average; if it is empty, draw again."""
        ids = list(server.roster)
        rng = self._secret(server, "cohort")
        while True:
            drawn = np.flatnonzero(rng.random(len(ids)) < server.cohort_size / len(ids))
            if len(drawn):
                return sorted(int(ids[place]) for place in drawn)

    def aggregate(self, server: fl.ServerContext, updates: Sequence[fl.Update]) -> StateDict:
        """Clip, add up, add noise and divide. Integer entries, which count batches, stay unchanged."""
        rng = self._secret(server, "noise")
        names = sorted(name for name, tensor in server.state.items() if tensor.is_floating_point())
        sums = {name: torch.zeros(server.state[name].shape, dtype=torch.float64) for name in names}
        for update in updates:
            squares = sum(float(update.delta[name].to(torch.float64).square().sum()) for name in names)
            scale = min(1.0, self.clip / max(squares**0.5, 1e-300))
            for name in names:
                sums[name] += scale * update.delta[name].to(torch.float64)
        changes = {}
        for name in names:
            drawn = torch.from_numpy(np.asarray(rng.standard_normal(tuple(sums[name].shape))))
            changes[name] = (sums[name] + self.noise * self.clip * drawn) / server.cohort_size
            if name.endswith("running_var"):  # noise could make a variance negative
                changes[name] = torch.maximum(changes[name], -0.9 * server.state[name].to(torch.float64))
        return moved(server.state, changes)

    def _secret(self, server: fl.ServerContext, what: str) -> np.random.Generator:
        """Return a generator that clients cannot reproduce: they know the seed of the run, but not this one."""
        seed = server.memory.setdefault("seed", secrets.token_hex(16))
        return np.random.default_rng([int(seed, 16), server.round, ("cohort", "noise").index(what)])


def epsilon(noise: float, rate: float, rounds: int, delta: float = 1e-5) -> float:
    """Return ε of (ε, δ)-privacy after some rounds that drew each client with probability `rate`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns about the ends of its range of orders
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        accountant.history = [(noise, rate, rounds)]
        return float(accountant.get_epsilon(delta))


def main() -> None:
    """Train with two amounts of noise on scikit-learn's digits, and print accuracy and ε."""
    preset = dataclasses.replace(fl.preset_for(dataset="digits"), clients=60)
    problem, clients = fl.build_problem(preset, seed=0)
    config = fl.RunConfig(rounds=ROUNDS, cohort=30, training=preset.training)
    for noise in (0.3, 1.0):
        result = fl.run(PrivateFedAvg(noise=noise), problem, clients, config)
        spent = epsilon(noise, config.cohort / len(clients), ROUNDS)
        print(f"noise {noise:g}: global accuracy {result.final.shared['accuracy']:.1%}, epsilon {spent:.3g}")


if __name__ == "__main__":
    main()
