"""Share policies: which entries of the state travel, and under which mask they go up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsekit.units.graph import UnitGraph
from sparsekit_fl.context import ClientContext
from sparsekit_fl.sparse import Mask

if TYPE_CHECKING:
    from sparsekit_fl.policies.local import LocalResult

__all__ = ["Everything", "Nothing", "SharePolicy"]


class SharePolicy:
    """What travels. The default shares every entry and uploads what was trained."""

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        """True where the entry travels; the others stay on the client from round to round.

        Args:
            name: State-dict key.
            graph: The units and shapes of the model.
        """
        return True

    def upload_mask(self, ctx: ClientContext, result: LocalResult) -> Mask | None:
        """What goes up, where that differs from what was trained under."""
        return result.mask


@dataclass(frozen=True)
class Everything(SharePolicy):
    """Every entry, buffers included."""


@dataclass(frozen=True)
class Nothing(SharePolicy):
    """No entry: each client goes on alone from its own last state."""

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        """False."""
        return False
