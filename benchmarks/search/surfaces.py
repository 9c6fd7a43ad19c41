"""Surfaces to search: spaces whose every point's outcome is known, so that regret can be computed.

The synthetic ones follow the roofline of a decode round (engine.roofline's terms, with made-up constants): rows of a
verify cost what the slower of weight reads and products costs, a draft costs its layers, eager rounds cost the host,
and accept length grows with block, depth and tree. On top come what a roofline does not know: crashes that no static
check sees, kernels that like some sizes better, and limits of the KV cache. Recorded ones are studies of real servers
that measured every point of their space: a NAME.yaml and a NAME.jsonl in this folder is a surface.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from tuner.records import Failure, FailureKind, Level, TrialRecord, config_dict
from tuner.simulate import Row, Table, read_table
from tuner.space import Space, load_space, parse_space

HERE = Path(__file__).parent
Outcome = FailureKind | dict[int, dict[str, float]]


@dataclass(frozen=True)
class Surface:
    """A space, the truth about each of its points, and how much a measurement of it scatters."""

    name: str
    space: Space
    table: Table


@dataclass(frozen=True)
class Machine:
    """Constants of a made-up server. Times in ms."""

    weights: float = 4.0  # reading the weights once
    row: float = 0.03  # products of one row
    host: float = 2.6  # an eager round's launches
    replay: float = 0.25  # a captured round's
    layer: float = 0.16  # one draft layer
    rates: tuple[float, ...] = (0.66, 0.74, 0.785, 0.80)  # acceptance of a position, by draft layers
    kv_tokens: float = 90_000.0  # KV cache at kv_fraction 1
    request: float = 1200.0  # tokens a request holds
    rough: float = 0.0  # kernels' preferences, as a share, drawn per block and backend


def dflash_space(seed: int = 0) -> str:
    """12,120 points: three drafts, two of them with knobs of their own, and what the server adds."""
    return f"""\
schema: 1
study: {{name: dflash12k, seed: {seed}, budget: {{trials: 60}}}}
engine: {{model: {{target: made-up}}, backend: {{kind: sglang}}}}
search:
  draft.kind: [none, dflash, ddtree]
  draft.block_size: {{choices: [4, 6, 8, 12, 16], when: {{draft.kind: [dflash, ddtree]}}}}
  draft.layers: {{int: [1, 4], when: {{draft.kind: [dflash, ddtree]}}}}
  draft.nodes: {{choices: [15, 23, 31, 63], when: {{draft.kind: [ddtree]}}}}
  graphs: {{choices: [{{kind: eager}}, {{kind: captured, batch_sizes: [1, 2, 4, 8]}}, \
{{kind: captured, batch_sizes: [1, 2, 4, 8, 16, 32]}}]}}
  memory.max_running: [32, 48, 64, 96]
  memory.kv_fraction: [0.7, 0.76, 0.82, 0.88, 0.94]
  attention.backend: [triton, fa3]
workload: {{prompts: bundled, output_tokens: 128, concurrency: [1, 8, 32]}}
objectives:
  - {{metric: tpot_ms_p50, goal: min, at: 1}}
  - {{metric: output_tok_s, goal: max, at: 32}}
pick: {{load: 32}}
"""


def dflash(config: EngineConfig, machine: Machine) -> Outcome:
    """One point of the DFlash space: its crash, or what it measures."""
    return dflash_crash(config) or dflash_curve(config, machine)


def dflash_crash(config: EngineConfig) -> FailureKind | None:
    """What no static check sees: workspaces grow with captured rows and running requests; one kernel has no tree."""
    rows, largest = _rows(config), _largest(config)
    workspace = (0.0007 * largest + 0.00012 * config.memory.max_running) * rows**0.5
    if _kv_fraction(config) + workspace > 1.0:
        return "oom_capture" if largest else "oom_load"
    if config.attention.backend == "fa3" and config.draft.kind == "ddtree" and rows > 32:
        return "kernel_compile"
    return None


def dflash_curve(config: EngineConfig, machine: Machine) -> dict[int, dict[str, float]]:
    """TPOT, TTFT, throughput and accept length at each concurrency."""
    draft, rows = config.draft, _rows(config)
    block, layers = getattr(draft, "block_size", 1), getattr(draft, "layers", None) or 0
    nodes, fa3 = getattr(draft, "nodes", block - 1), config.attention.backend == "fa3"
    found: dict[int, dict[str, float]] = {}
    for level in (1, 8, 32):
        capacity = _kv_fraction(config) * machine.kv_tokens / (machine.request + 14.0 * rows)
        running = min(level, config.memory.max_running, max(1.0, capacity))
        found[level] = _round(machine, draft.kind, running, level, rows, block, layers, nodes, _largest(config), fa3)
    return found


def _rows(config: EngineConfig) -> int:
    """Rows of a verify, one request's."""
    block = int(getattr(config.draft, "block_size", 1))
    return int(getattr(config.draft, "nodes", block)) + 1 if config.draft.kind == "ddtree" else block


def _largest(config: EngineConfig) -> int:
    """The largest captured batch, 0 for eager rounds."""
    return config.graphs.batch_sizes[-1] if config.graphs.kind == "captured" else 0


def _kv_fraction(config: EngineConfig) -> float:
    return config.memory.kv_fraction or 0.85


def _round(
    machine: Machine,
    kind: str,
    running: float,
    level: int,
    rows: int,
    block: int,
    layers: int,
    nodes: int,
    largest: int,
    fa3: bool,
) -> dict[str, float]:
    total = running * rows
    attention = running * 0.012 * (0.8 if fa3 else 1.0) * (1 + 0.04 * rows)
    verify = (machine.weights**3 + (machine.row * total) ** 3) ** (1 / 3) + attention
    liking = 1 + machine.rough * (_fixed(f"{rows}/{fa3}/{largest}") - 0.5)
    overhead = machine.replay * (1 + running / 32) if running <= largest else machine.host
    accept, propose = 1.0, 0.0
    if kind != "none":
        rate = machine.rates[layers - 1]
        accept = (1 - rate**block) / (1 - rate)
        propose = 0.35 + machine.layer * layers + 0.0011 * running * block * layers
        overhead += machine.host * 0.6 if running > largest else machine.replay
    if kind == "ddtree":
        wide = nodes / (block - 1)
        accept *= (1 + 0.13 * math.log2(wide)) if wide >= 1 else wide**0.5
        accept = min(accept, float(block))
        propose += 0.12 + 0.011 * nodes + 0.002 * running * nodes
    each = (verify * liking + propose + overhead) / accept
    waits = level / running
    return {
        "tpot_ms_p50": each,
        "output_tok_s": 1000 * running / each * 0.97,
        "ttft_ms_p90": 18 + 6 * running**0.5 + 900 * (waits - 1),
        "accept_length": accept,
    }


def cluster_space() -> str:
    """1,152 points: an 8-GPU box, how to split it, and a latency limit."""
    return """\
schema: 1
study: {name: eight_gpus, seed: 0, budget: {trials: 60}}
engine: {model: {target: made-up}, backend: {kind: sglang}}
search:
  draft.kind: [none, dflash]
  draft.block_size: {choices: [4, 8, 12, 16], when: {draft.kind: [dflash]}}
  draft.layers: {choices: [2, 4], when: {draft.kind: [dflash]}}
  parallel.tensor: [1, 2, 4, 8]
  parallel.data: [1, 2, 4, 8]
  memory.max_running: [16, 32, 64, 128]
  memory.prefill_chunk: [512, 2048, 8192]
workload: {prompts: bundled, output_tokens: 128, concurrency: [1, 16, 64]}
objectives:
  - {metric: tpot_ms_p50, goal: min, at: 1}
  - {metric: output_tok_s, goal: max, at: 64}
constraints: [{metric: ttft_ms_p90, max: 400, at: 64}]
pick: {load: 64}
"""


def cluster(config: EngineConfig) -> Outcome | None:
    """One point of the 8-GPU space; None where the box is too small, which static checks know."""
    tensor, data = config.parallel.tensor, config.parallel.data
    if tensor * data > 8:
        return None
    block, layers = getattr(config.draft, "block_size", 1), getattr(config.draft, "layers", None) or 0
    chunk, most = config.memory.prefill_chunk or 2048, config.memory.max_running
    if tensor == 1 and (most * block > 700 or chunk > 4000):
        return "oom_load"
    if tensor == 2 and most * block > 1500:
        return "oom_load"
    if tensor == 8 and config.draft.kind == "dflash" and chunk < 1000:
        return "distributed_init"
    rates = {0: 0.0, 2: 0.72, 4: 0.79}
    found: dict[int, dict[str, float]] = {}
    for level in (1, 16, 64):
        local = min(math.ceil(level / data), most)
        rows = local * block
        verify = ((14.0 / tensor) ** 3 + (0.09 * rows / tensor) ** 3) ** (1 / 3) + 0.22 * math.log2(2 * tensor)
        propose = (0.5 + 0.35 * layers + 0.002 * rows) if layers else 0.0
        accept = (1 - rates[layers] ** block) / (1 - rates[layers]) if layers else 1.0
        stall = 0.10 * chunk / 512 * local**0.5 / tensor**0.5
        each = (verify + propose + 0.6 + stall * 0.2) / accept
        queue = max(0.0, level / data / local - 1)
        found[level] = {
            "tpot_ms_p50": each,
            "output_tok_s": 1000 * min(level, local * data) / each * 0.96,
            "ttft_ms_p90": 30 + 25 * local**0.5 * (2048 / chunk) ** 0.4 / tensor**0.6 + 2000 * queue,
            "accept_length": accept,
        }
    return found


def _fixed(text: str) -> float:
    """Return a number in [0, 1) that always belongs to this text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32


def build(
    name: str,
    text: str,
    outcome: Callable[[EngineConfig], Outcome | None],
    noise: Callable[[EngineConfig], float],
) -> Surface:
    """Return the surface of a space and a function."""
    space = parse_space(text.encode())
    rows: list[Row] = []
    for assignment in space.points():
        config = space.assemble(assignment)
        if not isinstance(config, EngineConfig):
            continue
        found = outcome(config)
        if found is None:
            continue
        scatter = noise(config)
        scatters = dict.fromkeys(_NOISY, scatter) | {"accept_length": scatter / 3}  # a mean over many rounds
        rows.append(Row(_record(len(rows), config, found), assignment, scatters))
    return Surface(name, space, Table(tuple(rows)))


_NOISY = ("tpot_ms_p50", "output_tok_s", "ttft_ms_p90")


def _record(number: int, config: EngineConfig, found: FailureKind | dict[int, dict[str, float]]) -> TrialRecord:
    fields: dict[str, Any] = {"trial": number, "role": "search", "config": config_dict(config)}
    if isinstance(found, str):
        stage = "load" if found == "oom_load" else "launch"
        return TrialRecord.model_construct(
            **fields, state="failed", failure=Failure(kind=found, stage=stage), levels=(), seconds={}, of=None
        )
    levels = tuple(Level.model_construct(concurrency=c, metrics=m, intervals={}, n=30) for c, m in found.items())
    return TrialRecord.model_construct(
        **fields, state="measured", failure=None, levels=levels, seconds={"ready": 60.0, "load": 90.0}, of=None
    )


def quiet(config: EngineConfig) -> float:
    """3 % everywhere."""
    return 0.03


def loud(config: EngineConfig) -> float:
    """Around 10 %: eager rounds and trees scatter more than captured chains."""
    return 0.08 + 0.03 * (config.graphs.kind == "eager") + 0.02 * (config.draft.kind == "ddtree")


def dflash12k() -> Surface:
    return build("dflash12k", dflash_space(), lambda config: dflash(config, Machine()), quiet)


def dflash12k_loud() -> Surface:
    return build("dflash12k_loud", dflash_space(), lambda config: dflash(config, Machine()), loud)


def rough12k() -> Surface:
    """The same space on a slower, compute-bound machine whose kernels like some sizes better than their neighbours."""
    machine = Machine(weights=2.6, row=0.06, host=1.7, layer=0.3, rates=(0.6, 0.66, 0.69, 0.7), rough=0.3)
    return build("rough12k", dflash_space(), lambda config: dflash(config, machine), quiet)


def eight_gpus() -> Surface:
    return build("eight_gpus", cluster_space(), cluster, quiet)


def recorded(name: str) -> Surface:
    """Every point of a space as it was measured: NAME.yaml and NAME.jsonl beside this file."""
    space = load_space(HERE / f"{name}.yaml")
    return Surface(name, space, read_table(HERE / f"{name}.jsonl", space))


LARGE = ("dflash12k", "dflash12k_loud", "rough12k")  # 12,120 points each
SYNTHETIC: dict[str, Callable[[], Surface]] = {
    function.__name__: function for function in (dflash12k, dflash12k_loud, rough12k, eight_gpus)
}
RECORDED = tuple(path.stem for path in sorted(HERE.glob("*.jsonl")) if path.with_suffix(".yaml").exists())
SURFACES: dict[str, Callable[[], Surface]] = SYNTHETIC | {name: partial(recorded, name) for name in RECORDED}
