"""WorkerState: the part of a worker process that lives from client to client."""

from __future__ import annotations

from sparsekit.graph import StateDict
from sparsekit.rng import torch_scope
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.context.client import ClientContext
from sparsekit_fl.context.memory import Memory, rngs_by_kind
from sparsekit_fl.options.devices import device_of, use_exact_arithmetic
from sparsekit_fl.problem.clients import Capability, Client
from sparsekit_fl.streams import Streams
from sparsekit_fl.wire.kept import Mask

_SPLITS = ("train", "val", "test")


class WorkerState:
    """The part of a worker process that lives from client to client: the spec and one learnable mask, loaded for each client.

    Args:
        spec: The fixed parts of the run.
        device: Where the model trains; None takes the first device of the run.
    """

    def __init__(self, spec: RunSpec, device: str | None = None) -> None:
        self.spec = spec
        self.device = device_of(spec.config.device) if device is None else device
        if spec.config.deterministic:
            use_exact_arithmetic()
        with torch_scope(Streams(spec.config.seed).model()):
            model = spec.problem.model().to(self.device)
        self.masked = LearnableMask(model, graph=spec.graph, learning=GradientImportance(explore=0.0))

    def context(
        self,
        *,
        client: Client,
        round: int,
        capability: Capability,
        memory: Memory,
        extra: StateDict | None = None,
        received: Mask | None = None,
    ) -> ClientContext:
        """Make the context of one client in one round."""
        spec = self.spec
        return ClientContext(
            round=round,
            rounds=spec.config.rounds,
            client=client,
            capability=capability,
            problem=spec.problem,
            graph=spec.graph,
            training=spec.training(max(round, 1)),
            costs=spec.costs,
            masked=self.masked,
            device=self.device,
            rngs=rngs_by_kind(Streams(spec.config.seed).client(round, client.id)),
            memory=memory,
            extra=extra or {},
            received=received,
            initial_state=lambda: spec.initial,
            cache={},
            frozen=spec.frozen,
            reading=lambda split: Streams(spec.config.seed).reading(round, client.id).spawn(3)[_SPLITS.index(split)],
        )
