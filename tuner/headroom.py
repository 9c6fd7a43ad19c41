"""How far a trial is from what the machine could do: its share of the roofline, and what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine import estimate
from engine.config import DFlashDraft, EngineConfig, draft_folder, target_folder
from engine.errors import EngineError
from tuner.records import Level


def headroom(config: EngineConfig, levels: Sequence[Level]) -> dict[str, Any] | None:
    """Return {concurrency: {share, bound, tok_s_limit}}, or {unknown: why} where no estimate is possible.

    `share` is output tokens/s over the roofline's, at the measured accept length; contexts, launches, Python and
    communication are not in the roofline, so 1 is out of reach. Unknown when the machine's bandwidth is (a CPU:
    small weights stay in its caches, and no datasheet says how fast those are) or the model is not readable here.
    None when nothing was measured.
    """
    try:
        machine = estimate.detect_machine()
        shape = estimate.read_shape(target_folder(config))
        drafts = [draft for draft in config.drafts if isinstance(draft, DFlashDraft)]
        draft_shape = estimate.read_draft_shape(draft_folder(config, drafts[0])) if drafts else None
        found = {}
        for level in levels:
            speed = level.metrics.get("output_tok_s")
            if speed is None:
                continue
            accept = level.metrics.get("accept_length")
            limit = estimate.round_time(
                config,
                shape,
                draft_shape,
                machine,
                running=level.concurrency,
                accept_length=accept,
            )
            found[str(level.concurrency)] = {
                "share": estimate.headroom(speed, limit),
                "bound": limit.bound,
                "tok_s_limit": limit.tokens_per_second,
            }
    except EngineError as error:
        return {"unknown": str(error)}
    return found or None
