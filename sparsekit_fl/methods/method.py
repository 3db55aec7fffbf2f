"""Method: a name, a source and seven policies. All defaults together are FedAvg.

The hooks of the policies, in the order in which a run calls them:

Before the first round: `Method.configure`, `local.prepare`, then `check` of all policies, in the order of the fields below.
`share.is_shared` splits the state into what travels and what stays on the client.

In a round:

1. The server calls `sampling.sample`, and for each client of the cohort `ratio.propose`, `mask.propose`,
   `aggregate.broadcast`.
2. Each client calls `ratio.choose`, `share.enter`, `mask.choose`, `local.train`, `mask.keep`, `personal.keep`,
   `share.upload_mask`, and `share.leave` for each entry that goes up.
3. For each update the server calls `aggregate.validate`, `ratio.validate`, `mask.validate`, `sampling.validate`. An update
   that one of them refuses changes nothing.
4. With all valid updates it calls `sampling.arrivals` and `aggregate.combine`, which asks `aggregate.counted` how each
   counts, and `sampling.seconds`.
5. Last it calls `ratio.observe`, `mask.observe`, `sampling.observe`.

To score a client: `personal.model`, `personal.calibrate`.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from sparsekit.errors import InvalidValueError
from sparsekit_fl.config import RunConfig
from sparsekit_fl.policies import AggregatePolicy, Dense, Full, LocalPolicy, MaskPolicy, Mean, RatioPolicy, Sgd
from sparsekit_fl.policies.context import Policy
from sparsekit_fl.policies.personal import GlobalModel, PersonalPolicy
from sparsekit_fl.policies.sampling import SamplingPolicy, Uniform
from sparsekit_fl.policies.share import Everything, SharePolicy

KINDS: dict[str, type[Policy]] = {
    "sampling": SamplingPolicy,
    "ratio": RatioPolicy,
    "mask": MaskPolicy,
    "local": LocalPolicy,
    "share": SharePolicy,
    "aggregate": AggregatePolicy,
    "personal": PersonalPolicy,
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A paper's recipe.

    Args:
        name: As in tables and results.
        source: Where it was published.
        sampling: Who trains.
        ratio: How large a submodel.
        mask: Which units or entries.
        local: How a client learns.
        share: Which entries travel.
        aggregate: How the server combines updates.
        personal: Which model a client deploys.
        note: What a reader of its numbers must know, one sentence; tables print it as a footnote. For example that masks
            of single weights save bytes and not time. It is prose: `describe` leaves it out.
        capability: Draw the clients' levels once or every round, whatever the run says, for experiments whose point this
            is; None leaves it to the run.

    Source: the defaults are McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
        Data", AISTATS 2017.
    """

    name: str
    source: str
    sampling: SamplingPolicy = field(default_factory=Uniform)
    ratio: RatioPolicy = field(default_factory=Full)
    mask: MaskPolicy = field(default_factory=Dense)
    local: LocalPolicy = field(default_factory=Sgd)
    share: SharePolicy = field(default_factory=Everything)
    aggregate: AggregatePolicy = field(default_factory=Mean)
    personal: PersonalPolicy = field(default_factory=GlobalModel)
    note: str = ""
    capability: Literal["fixed", "dynamic"] | None = None

    def __post_init__(self) -> None:
        for kind, base in KINDS.items():
            policy = getattr(self, kind)
            if not isinstance(policy, base):
                raise InvalidValueError(
                    f"{kind} of method {self.name!r} must be a {base.__name__}, got {policy!r};"
                    f" inherit sparsekit_fl.policies.{base.__name__}, and pass an instance, not the class"
                )
        if self.capability not in (None, "fixed", "dynamic"):
            raise InvalidValueError(
                f"capability of method {self.name!r} must be None, 'fixed' or 'dynamic', got {self.capability!r};"
                " None leaves it to RunConfig.capability"
            )

    def configure(self, config: RunConfig) -> RunConfig:
        """Return the options of a run as this method leaves them."""
        return config if self.capability is None else dataclasses.replace(config, capability=self.capability)

    def policies(self) -> dict[str, Policy]:
        """Return kind → policy, in the order of the fields."""
        return {kind: getattr(self, kind) for kind in KINDS}

    def describe(self) -> dict[str, str]:
        """Return every policy and its options as text: equal for equal methods, in any process."""
        policies = {kind: _text(policy) for kind, policy in self.policies().items()}
        described = {"name": self.name, "source": self.source, **policies}
        # Only where a method decides it, so that a report can tell its choice from an option of the run.
        return described if self.capability is None else {**described, "capability": self.capability}


def _text(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        options = ", ".join(f"{f.name}={_text(getattr(value, f.name))}" for f in dataclasses.fields(value) if f.repr)
        return f"{type(value).__name__}({options})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    # Addresses of objects without a proper repr differ from process to process.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
