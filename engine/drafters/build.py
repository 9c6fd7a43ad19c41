"""From draft configs to drafters: one draft model, loaded once, serves every draft of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import (
    BUNDLED,
    DEFAULT_MAX_NODES,
    PAIR,
    DDTreeDraft,
    DFlashDraft,
    Draft,
    NoDraft,
    PolicyDraft,
    expanded,
)
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
    """What drafters are made of.

    `model`: None on a server without speculation. `layers`: as many as context KV is kept for; `rows`: as many as
    requests reserve; `folder`: where the model came from; `costs`: measured for trees that grow by them.
    """

    model: DraftModel | None
    attention: Attention | None
    layers: int
    rows: int
    folder: Path | None = None
    costs: CostTable | None = None

    def make(self, draft: Draft) -> Drafter:
        """Return the drafter that a config describes.

        On a server with a draft model every drafter keeps its context KV whole, also one that never uses it: the
        next policy may.

        Raises:
            ConfigError: it needs more than this server has: a drafter, layers, reserved rows, measured costs.
        """
        ranges = draft.by_running if isinstance(draft, PolicyDraft) else ((1, None, draft),)
        entries = [self._simple(each) for _, _, each in ranges]
        speculates = any(entry.taps for entry in entries)
        if isinstance(draft, PolicyDraft) or (self.model is not None and not speculates):
            return PolicyDrafter(entries, [last for _, last, _ in ranges], self._learner())
        return entries[0]

    def _learner(self) -> Drafter | None:
        """Return a drafter that takes in features for whoever drafts: context KV is the same for all."""
        if self.model is None or self.attention is None:
            return None
        return DFlashDrafter(self.model, self.attention, self.model.shape.block_size, self.layers)

    def _simple(self, draft: NoDraft | DFlashDraft | DDTreeDraft) -> Drafter:
        if isinstance(draft, NoDraft):
            return NoDrafter()
        if self.model is None or self.attention is None:
            raise ConfigError("this server was started without a drafter; start it with a policy that has one")
        judge(draft, self.layers, self.rows, self.folder)
        layers = draft.layers or self.layers
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


def judge(draft: DFlashDraft, layers: int, rows: int, folder: Path | None) -> None:
    """Judge whether a server with so many draft layers and reserved rows, its drafter from `folder`, can run a draft.

    Raises:
        ConfigError: it cannot.
    """
    needed = max(draft.verify_rows, draft.block_size)
    if (draft.layers or layers) > layers or needed > rows:
        raise ConfigError(
            f"this server was started for {layers} draft layers and {rows} rows a round, "
            f"the draft needs {draft.layers or layers} and {needed}; start it with the larger draft in its policy"
        )
    if draft.window is not None:
        raise ConfigError("the native engine cannot do a draft window yet; leave window out")
    if draft.model is not None and _another(draft.model, folder):
        raise ConfigError(f"this server's drafter is {folder}, not {draft.model}; start a server with that one")


def _another(name: str, own: Path | None) -> bool:
    folder = PAIR / "draft" if name == BUNDLED else expanded(name)
    return own is None or folder.resolve() != own.resolve()
