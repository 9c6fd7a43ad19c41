"""From draft configs to drafters: one draft model, loaded once, serves every draft of a server."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import DEFAULT_MAX_NODES, DDTreeDraft, DFlashDraft, Draft, NoDraft, PolicyDraft
from engine.cost import CostTable
from engine.drafters.base import Drafter
from engine.drafters.ddtree import DDTreeDrafter, Fixed, Growing
from engine.drafters.dflash import DFlashDrafter
from engine.drafters.none import NoDrafter
from engine.drafters.policy import PolicyDrafter
from engine.errors import ConfigError
from engine.model.attention.base import Attention
from engine.model.draft import DraftModel


@dataclass(frozen=True)
class DraftKit:
    """What drafters are made of. `layers`: as many as context KV is kept for; `rows`: as many as requests reserve."""

    model: DraftModel | None
    attention: Attention | None
    layers: int
    rows: int
    costs: CostTable | None = None

    def make(self, draft: Draft) -> Drafter:
        """Return the drafter that a config describes.

        Raises:
            ConfigError: it needs more than this server has: a drafter, layers, reserved rows, measured costs.
        """
        if isinstance(draft, PolicyDraft):
            entries = [self._simple(each) for _, _, each in draft.by_running]
            return PolicyDrafter(entries, [last for _, last, _ in draft.by_running])
        return self._simple(draft)

    def _simple(self, draft: NoDraft | DFlashDraft | DDTreeDraft) -> Drafter:
        if isinstance(draft, NoDraft):
            return NoDrafter()
        if self.model is None or self.attention is None:
            raise ConfigError("this server was started without a drafter; start it with a policy that has one")
        layers = draft.layers or self.layers
        needed = max(draft.verify_rows, draft.block_size)
        if layers > self.layers or needed > self.rows:
            raise ConfigError(
                f"this server was started for {self.layers} draft layers and {self.rows} rows a round, "
                f"the draft needs {layers} and {needed}; start it with the larger draft in its policy"
            )
        draws = draft.sample == "probabilistic"
        chain = DFlashDrafter(
            self.model, self.attention, draft.block_size, layers, draws=draws, forced=draft.simulate_accept
        )
        if not isinstance(draft, DDTreeDraft):
            return chain
        if draft.nodes != "auto":
            return DDTreeDrafter(chain, Fixed(draft.nodes), draft.width)
        if self.costs is None:
            raise ConfigError("nodes: auto needs costs measured at start-up; start the server with it in its policy")
        return DDTreeDrafter(chain, Growing(draft.max_nodes or DEFAULT_MAX_NODES, self.costs), draft.width)
