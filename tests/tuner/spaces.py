"""Small space files that the tests vary."""

from pathlib import Path

SPACE = """\
schema: 1
study: {name: small, seed: 0, budget: {trials: 16, wall: 150s}}
engine:
  model: {target: bundled}
  memory: {max_running: 16}
search:
  draft.kind: [none, dflash]
  draft.block_size: {choices: [4, 8], when: {draft.kind: [dflash]}}
  draft.layers: {int: [1, 4], when: {draft.kind: [dflash]}}
  graphs: {choices: [{kind: eager}, {kind: captured, batch_sizes: [1, 4]}]}
workload: {prompts: bundled, output_tokens: 64, concurrency: [1, 4, 8], client_lag: 1000}
objectives:
  - {metric: tpot_ms_p50, goal: min, at: 1}
  - {metric: output_tok_s, goal: max, at: 8}
constraints: [{metric: ttft_ms_p90, max: 2000, at: 8}]
pick: {slo: "ttft_ms_p90<500", load: 8}
executor: {kind: local}
"""

PAIR = Path(__file__).parents[1] / "data" / "smoke_pair"

SMOKE = SPACE.replace(
    "model: {target: bundled}", f"model: {{target: {PAIR / 'target'}}}\n  draft: {{model: {PAIR / 'draft'}}}"
).replace("[4, 8]", "[2, 4, 6, 8, 10, 12]")
"""The smoke pair, whose drafter has two layers: of 50 points 13 can run without a GPU."""


def write(folder: Path, text: str = SMOKE) -> Path:
    """Write a space file and return its path."""
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    return path
