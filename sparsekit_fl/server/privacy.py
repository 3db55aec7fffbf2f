"""Client-level differential privacy of the global models: clip each client's change, add Gaussian noise, account for both.

Protected is whether a client took part with all its data: two data sets are neighbours where one client's changes are absent
from one of them. Released is the sequence of global models. The noise has a seed of its own, since clients know the seed of the
run, and whoever knows the noise seed can subtract the noise. It is drawn once a run by the operating system and stays with the
server and its checkpoint, so that a resumed run goes on to the same bits.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparsekit.errors import InvalidValueError, MissingDependencyError, install_hint
from sparsekit.graph import StateDict
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.policies.aggregate import AggregatePolicy, Changes, Counted, Over, add_up, scales_to
from sparsekit_fl.policies.mask import MaskPolicy
from sparsekit_fl.policies.ratio import RatioPolicy
from sparsekit_fl.policies.sampling import Poisson, SamplingPolicy
from sparsekit_fl.streams import Streams

if TYPE_CHECKING:
    from sparsekit_fl.methods.method import Method

# The number of bits that seed a generator of NumPy.
_SECRET_BITS = 128

_ASSUMES = (
    "Neighbouring runs differ in whether one client's changes count. epsilon holds for the sampling that took place: the coins"
    " of Poisson sampling, or a cohort of fixed size drawn without replacement, each among the clients that could be reached."
    " Cohorts are drawn from the secret seed of the noise, and must stay secret; epsilon_unamplified holds whatever is known of"
    " them. epsilon_as_poisson is what is customarily stated for cohorts of fixed size, for which it is not proven. All protect"
    " the sequence of global models alone, from those who do not know the seed of the noise, which is in the checkpoint, and in"
    " this file where dp_noise_seed gave it: not the cohorts, losses and scores of this file, nor the models that clients"
    " deploy."
)


def noisy_mean(
    state: StateDict,
    updates: Sequence[Counted],
    over: Over,  # noqa: ARG001 - the number of holders would tell of clients
    *,
    config: RunConfig,
    streams: Streams,
    round: int,
) -> Changes:
    """Add up clipped changes, add Gaussian noise, and divide the sum by the number of *expected* clients.

    Each change is scaled to norm C at most, over all floating-point entries that are sent, biases and norm statistics too.
    Noise of standard deviation z · C is added to the sum of every such entry, also to entries that nobody held, so that it
    shows nowhere who held what. All clients count equally. The divisor is the size of the cohort that was asked for, whoever
    answered and whoever held an entry: with or without one client the sum differs by C at most, whatever masks clients
    choose. A method that divides by the holders of an entry divides by the whole cohort here: the number of holders would
    itself tell of clients, and an entry that one client holds would move by that client's whole change.

    Integer entries, which count batches, do not move. Running variances are kept above a tenth of their old value, as noise
    could make them negative; this is done to what is public already.

    Args:
        state: The shared state before the round.
        updates: The updates; every entry counts as held by the whole cohort.
        over: Not used.
        config: Its `dp_clip` is C, the largest norm of a client's change, its `dp_noise` z, the noise multiplier, its `cohort`
            the number of clients that were asked for.
        streams: Streams of the noise alone; clients know those of the run.
        round: The round.

    Source: McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR 2018, whose
        fixed-denominator estimator this is.
    """
    clip, noise, expected = config.dp_clip, config.dp_noise, config.cohort
    assert clip is not None, "a private run has a norm"
    assert noise is not None, "and a noise multiplier"
    # All clients count equally, or a change of norm C could weigh more than C.
    sums = add_up(state, scales_to(updates, clip), [1.0] * len(updates))
    changes = {}
    for place, name in enumerate(sorted(state)):
        before = state[name]
        if not before.is_floating_point():
            continue
        drawn = torch.as_tensor(streams.noise(round, place).standard_normal(tuple(before.shape)), dtype=torch.float64)
        change = (sums[name] + noise * clip * drawn) / expected
        if name.rpartition(".")[2] == "running_var":  # what PyTorch's norms call it
            change = torch.maximum(change, -0.9 * before.to(torch.float64))
        changes[name] = change
    return Changes(changes, dict.fromkeys(state, float(expected)))


def _owner(policy: object, hook: str) -> type:
    """Return the class that defines a hook as a policy has it."""
    return next(kind for kind in type(policy).__mro__ if hook in vars(kind))


def check_private(method: Method) -> None:
    """Raise where something of a client reaches the models without noise.

    A server may learn from updates by another way than their changes, as from losses that decide who is sampled next; then
    later models hold what no noise covers. What a policy learns from one client may serve that client alone, which the policy
    declares by `learns_apart`.

    Raises:
        InvalidValueError: says which policy, and what it does.
    """
    if method.aggregate.mean_only:
        raise InvalidValueError(f"method {method.name!r} cannot be made private: {method.aggregate.mean_only}")
    if _owner(method.sampling, "sample") not in (SamplingPolicy, Poisson):
        raise InvalidValueError(
            f"method {method.name!r} cannot be made private: {type(method.sampling).__name__} does not sample uniformly, which"
            " the accountant counts on"
        )
    hooks: tuple[tuple[object, type, tuple[str, ...]], ...] = (
        (method.sampling, SamplingPolicy, ("observe", "arrivals")),
        (method.ratio, RatioPolicy, ("observe",)),
        (method.mask, MaskPolicy, ("observe",)),
        (method.aggregate, AggregatePolicy, ("broadcast",)),
    )
    for policy, base, names in hooks:
        for name in names:
            owner = _owner(policy, name)
            if owner is not base and not vars(owner).get("learns_apart", False):
                raise InvalidValueError(
                    f"method {method.name!r} cannot be made private: by {type(policy).__name__}.{name} its server learns from"
                    " what clients report beside their changes, which no noise covers; choose another method, such as fedavg"
                )


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """The guarantee of a run, once all its rounds are done.

    Args:
        epsilon: ε for the sampling that took place; see `assumes`.
        epsilon_unamplified: ε where a client may be in every round.
        epsilon_as_poisson: ε as if each client had been drawn by a coin of its own; a bound where the sampling is Poisson.
        delta: δ.
        clip: C, the largest norm of a client's change.
        noise: z, the noise multiplier.
        sampling_rate: Size of the cohort / number of clients that could be reached, in the round where it is largest.
        rounds: Number of models that are released.
        accountant: The library that computed ε, and its method.
        assumes: The assumptions behind ε.
    """

    epsilon: float
    epsilon_unamplified: float
    epsilon_as_poisson: float
    delta: float
    clip: float
    noise: float
    sampling_rate: float
    rounds: int
    accountant: str
    assumes: str = _ASSUMES


def _of_fixed_size(rate: float, noise: float, orders: Sequence[float]) -> list[float]:
    """Rényi divergences of one round whose cohort has a fixed size and is drawn without replacement.

    Draw the same cohort with and without the client's changes. With probability 1 − q the client is not in it, and the models
    are distributed alike; else they are Gaussians whose means differ by C at most. ∫ p^α r^(1−α) is jointly convex in (p, r),
    so that of the mixtures is at most 1 − q + q · exp(α (α − 1) / (2 z²)).
    """
    return [
        math.log1p(rate * math.expm1(alpha * (alpha - 1) / (2 * noise**2))) / (alpha - 1)
        if alpha * (alpha - 1) / (2 * noise**2) < 700
        else alpha / (2 * noise**2)
        for alpha in orders
    ]


@cache
def epsilon_of(*, noise: float, rates: tuple[float, ...], delta: float, fixed_size: bool = False) -> float:
    """Compute ε of Gaussian mechanisms on cohorts that are drawn, by their Rényi divergences.

    Args:
        noise: z, the noise multiplier.
        rates: Probability that a client is in the cohort, of each round.
        delta: δ.
        fixed_size: Whether cohorts have a fixed size and are drawn without replacement. Else each client is drawn by a coin of
            its own (Poisson sampling).

    Raises:
        MissingDependencyError: Opacus is not installed.

    Source: Mironov, Talwar, Zhang: Rényi Differential Privacy of the Sampled Gaussian Mechanism, 2019 (arXiv 1908.10530).
    """
    try:
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise MissingDependencyError(f"privacy needs Opacus: {error}; {install_hint('privacy')}") from error
    # Beyond Opacus's own orders, whose ends are too close for very little and for very much noise.
    orders = [1 + step / 100 for step in range(1, 10)] + [*RDPAccountant.DEFAULT_ALPHAS, 96, 128, 256, 512, 1024, 4096]
    spent = np.zeros(len(orders))
    for rate, rounds in Counter(rates).items():
        if fixed_size:
            spent += rounds * np.asarray(_of_fixed_size(rate, noise, orders))
        else:
            spent += rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=rounds, orders=orders)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an order at the end of the range is a bound too
        epsilon = float(rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0])
    return epsilon if math.isfinite(epsilon) else math.inf


def privacy_of(config: RunConfig, clients: Collection[int], *, poisson: bool = False) -> PrivacySpent | None:
    """Return the guarantee that a run will give at its end; None where it is not private.

    `poisson`: each client is drawn by a coin of its own, and not a cohort of fixed size.
    """
    if config.dp_clip is None or config.dp_noise is None:
        return None
    noise, rounds = config.dp_noise, config.rounds
    delta = min(1e-5, len(clients) ** -1.1) if config.dp_delta is None else config.dp_delta
    rates = (min(1.0, config.cohort / max(1, len(clients))),) * rounds
    as_poisson = epsilon_of(noise=noise, rates=rates, delta=delta)
    return PrivacySpent(
        epsilon=as_poisson if poisson else epsilon_of(noise=noise, rates=rates, delta=delta, fixed_size=True),
        epsilon_unamplified=epsilon_of(noise=noise, rates=(1.0,) * rounds, delta=delta),
        epsilon_as_poisson=as_poisson,
        delta=delta,
        clip=config.dp_clip,
        noise=noise,
        sampling_rate=max(rates),
        rounds=rounds,
        accountant=f"opacus {version('opacus')}, Rényi divergences",
    )


def new_noise_seed(config: RunConfig) -> int:
    """Return the seed of a new run's noise: the given one, or a secret."""
    return secrets.randbits(_SECRET_BITS) if config.dp_noise_seed is None else config.dp_noise_seed


def privacy_line(raw: Mapping[str, Any]) -> str:
    """Write a sentence about the `privacy` of a result."""
    amplified, plain = (
        "∞" if value is None or math.isinf(value) else f"{value:.3g}" for value in (raw["epsilon"], raw["epsilon_unamplified"])
    )
    return (
        f"Client-level differential privacy of the global models: ε = {amplified} at δ = {raw['delta']:.3g}"
        f" ({plain} for those who know the cohorts)."
    )
