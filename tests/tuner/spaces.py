"""A small space file that the tests vary."""

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
workload: {prompts: bundled, output_tokens: 64, concurrency: [1, 4, 8]}
objectives:
  - {metric: tpot_ms_p50, goal: min, at: 1}
  - {metric: output_tok_s, goal: max, at: 8}
constraints: [{metric: ttft_ms_p90, max: 2000, at: 8}]
pick: {slo: "ttft_ms_p90<500", load: 8}
executor: {kind: local}
"""
