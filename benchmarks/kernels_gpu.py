"""Device kernels on a GPU: `python -m benchmarks.kernels_gpu --json OUT` tests them, times them, sweeps the linears.

Shapes are Qwen3-8B's, weights and inputs random. Every time is the median of CUDA graph replays over buffers that no
cache holds together. "of copy" is bytes that must move over what a device-to-device copy moved on this GPU just now.
Linears are swept over more kernels than the engine's own choice measures; the last lines run whole decode steps of
the 36 layers in one graph: with the library's products, and with the fastest kernels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import attention, prefill
from engine.kernels.attention import AttendPlan
from engine.kernels.base import Paged
from engine.kernels.choice import TritonLinear, attempt, bucket, graph_seconds, time_plans
from engine.kernels.linear import Library, Plan, Product, Stream, Vector
from engine.kernels.prefill import PrefillPlan
from engine.kernels.reference import ReferenceOps
from engine.kernels.triton_ops import TritonOps

Call = Callable[[], object]
Step = Callable[[Any], Tensor]  # operations to logits
ROOT = Path(__file__).parent.parent
TYPE = torch.bfloat16
PAGE = 16
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """A dense transformer; Qwen3-8B by default."""

    hidden: int = 4096
    inner: int = 12288
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 151936

    def products(self) -> dict[str, tuple[int, int, bool, bool]]:
        """Return output, input, norm in front and gate of every linear of a layer, and of the head."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden, True, False),
            "out": (self.hidden, self.heads * self.dim, False, False),
            "gate_up": (2 * self.inner, self.hidden, True, True),
            "down": (self.hidden, self.inner, False, False),
            "head": (self.vocab, self.hidden, False, False),
        }


@dataclass
class Report:
    """Lines printed as they come, and the same as JSON."""

    path: Path
    device: torch.device
    copy: float = 1.0  # bytes/s
    began: float = field(default_factory=time.monotonic)
    document: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def add(self, part: str, row: dict[str, Any], nbytes: float | None = None, seconds: float | None = None) -> None:
        """Keep a row and print it; with bytes and seconds, their share of the copy's speed too."""
        if seconds is not None:
            row = row | {"us": round(seconds * 1e6, 2)}
        if seconds and nbytes is not None:
            row = row | {"GB_s": round(nbytes / seconds / 1e9), "of_copy": round(nbytes / seconds / self.copy, 3)}
        self.document.setdefault(part, []).append(row)
        self.say(f"{part:9s} " + "  ".join(f"{key}={value}" for key, value in row.items()))
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.document, indent=1) + "\n")


def sweep(rows: int, columns: int) -> tuple[Plan, ...]:
    """Return the kernels to time for a bucket of rows: with splits where few columns leave the chip idle."""
    wide = columns >= 8192
    if rows == 1:
        plans: list[Plan] = [
            Vector(8, 512), Vector(4, 1024), Vector(16, 512, 1, 8), Vector(8, 1024, 1, 8), Vector(2, 2048),
            Vector(16, 256, 1, 4, 4), Vector(8, 512, 1, 4, 4), Stream(16, 16, 256), Stream(16, 32, 128, 1, 4, 5),
        ]  # fmt: skip
        few: list[Plan] = [Stream(16, 32, 256, 2), Vector(8, 512, 2)]
        many: list[Plan] = [Stream(16, 64, 128), Vector(32, 256, 1, 8)]
    elif rows <= 16:
        plans = [
            Stream(16, 16, 256), Stream(16, 16, 512, 1, 4, 3), Stream(16, 32, 128, 1, 4, 6), Stream(16, 32, 256),
            Stream(16, 64, 128), Stream(16, 64, 128, swap=True), Stream(16, 32, 256, norm_first=True),
        ]  # fmt: skip
        few = [
            Stream(16, 32, 256, 2), Stream(16, 64, 128, 2), Stream(16, 64, 128, 4, swap=True),
            Stream(16, 128, 64, 4, 4, 5, swap=True),
        ]  # fmt: skip
        many = [Stream(16, 128, 64, 1, 8, 5), Stream(16, 128, 128, 1, 8, 3), Stream(16, 128, 64, 1, 4, 5, swap=True)]
    else:
        plans = [
            Stream(rows, 32, 128, 1, 4, 4, norm_first=True), Stream(rows, 64, 64, 1, 4, 5, norm_first=True),
            Stream(rows, 64, 128, 1, 4, 3, norm_first=True), Stream(rows, 64, 64, 1, 4, 5),
        ]  # fmt: skip
        few = [
            Stream(rows, 64, 64, 2, 4, 5, norm_first=True), Stream(rows, 64, 128, 2, 4, 3, norm_first=True),
            Stream(rows, 128, 64, 4, 8, 4, norm_first=True), Stream(rows, 64, 64, 4, 4, 5, norm_first=True),
        ]  # fmt: skip
        many = [
            Stream(rows, 128, 64, 1, 4, 4, norm_first=True), Stream(rows, 128, 64, 1, 8, 4, norm_first=True),
            Stream(rows, 64, 128, 1, 8, 3, norm_first=True), Stream(64, 128, 64, 1, 4, 4, norm_first=True),
        ]  # fmt: skip
    return (*plans, *(many if wide else few), Library())


class Model:
    """Random weights of all layers, and a decode step over them."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.layers: dict[str, list[TritonLinear]] = {
            name: [
                TritonLinear(Product(self._normal(out, inner, scale=inner**-0.5), None, EPS if norm else None, gated))
                for _ in range(1 if name == "head" else shape.layers)
            ]
            for name, (out, inner, norm, gated) in shape.products().items()
        }
        self.ones = torch.ones(shape.hidden, dtype=TYPE, device=device)
        self.head_ones = torch.ones(shape.dim, dtype=TYPE, device=device)
        angle = torch.rand(64, shape.dim // 2, device=device) * 6
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)

    def _normal(self, *size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, dtype=TYPE, device=self.device).mul_(scale)

    def step(self, batch: int, queries: int, length: int, layers: int | None = None) -> Step:
        """Return a decode or verify step of the layers and the head, giving logits, as the engine composes it."""
        shape, rows = self.shape, batch * queries
        layers = layers or shape.layers
        cached = cache(shape, batch, length + queries, layers, self.device)
        paged = Paged(cached.table, cached.lanes, torch.full_like(cached.lanes, length), PAGE)
        x = self._normal(rows, shape.hidden)
        positions = torch.arange(rows, device=self.device, dtype=torch.int32) % 64
        place = length + torch.arange(rows, device=self.device) % queries
        lane = torch.arange(rows, device=self.device) // queries
        write = (cached.table[cached.lanes[lane].long(), place // PAGE] * PAGE + place % PAGE).int()

        def run(ops: TritonOps) -> Tensor:
            residual = x
            for index in range(layers):
                layer = {name: each[index] for name, each in self.layers.items() if name != "head"}
                q = ops.rope_write(
                    layer["qkv"](residual), self.head_ones, self.head_ones, EPS, self.cos_sin, positions,
                    cached.pools[index], write,
                )  # fmt: skip
                seen = ops.attend(q, cached.pools[index], paged, queries, length + queries, True)
                residual = layer["out"].add(seen, residual)
                residual = layer["down"].add(layer["gate_up"](residual), residual)
            return self.layers["head"][0](ops.norm(residual, self.ones, EPS))

        return run

    def reference(self, step: Step) -> Tensor:
        """Return a step's logits with the library's products and torch's everything else."""
        for each in self.every():
            each.plans = {}
        return step(ReferenceOps())

    def every(self) -> Iterator[TritonLinear]:
        for each in self.layers.values():
            yield from each

    def use(self, plans: dict[str, Plan], rows: int) -> TritonOps:
        """Give the layers their kernels for `rows`, and return the operations."""
        for name, group in self.layers.items():
            for each in group:
                each.plans = {bucket(rows): plans[name]}
        return TritonOps(self.device)


@dataclass(frozen=True)
class Cached:
    """KV pools of some layers, and lanes on shuffled pages."""

    pools: list[Tensor]
    table: Tensor
    lanes: Tensor


def cache(shape: Shape, batch: int, tokens: int, pools: int, device: torch.device) -> Cached:
    """Return random pools with room for `tokens` of every lane."""
    pages = -(-tokens // PAGE)
    size = (batch * pages * PAGE, 2 * shape.kv_heads, shape.dim)
    made = [torch.randn(size, dtype=TYPE, device=device) for _ in range(pools)]
    table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    return Cached(made, table, torch.arange(batch, device=device, dtype=torch.int32))


# ---- parts


def start_tests(workers: int) -> subprocess.Popen[str]:
    """Start the kernels' tests, compiled; with pytest-xdist where it is installed, as compiling takes a core each."""
    command = [sys.executable, "-m", "pytest", "tests/engine/kernels", "-q", "-p", "no:cacheprovider"]
    try:
        import xdist  # noqa: F401

        command += ["-n", str(workers)]
    except ImportError:
        pass
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def compile_one(plan: Plan, rows: int, norm: bool, gated: bool, device: str) -> str | None:
    """Compile a linear kernel as the 8B shapes need it, on a small weight; return why it cannot run."""
    if isinstance(plan, Library):
        return None
    columns, inner = 16 * plan.block_n, 16 * plan.block_k
    weight = torch.zeros(columns * (2 if gated else 1), inner, dtype=TYPE, device=device)
    product = Product(weight, None, EPS if norm else None, gated)
    x, residual = torch.zeros(rows, inner, dtype=TYPE, device=device), None
    if not (norm or gated):
        residual = torch.zeros(rows, columns, dtype=TYPE, device=device)
    return attempt(lambda: plan(product, x, residual))


def compile_attention(plan: AttendPlan | PrefillPlan, queries: int, shape: Shape, device: str) -> str | None:
    """Compile an attention kernel for blocks of `queries`, split and not, or a prefill kernel for that many chunks."""
    if isinstance(plan, PrefillPlan):
        cached = cache(shape, queries, PAGE, 1, torch.device(device))
        paged = Paged(cached.table, cached.lanes, torch.zeros_like(cached.lanes), PAGE)
        q = torch.zeros(queries * PAGE, shape.heads, shape.dim, dtype=TYPE, device=device)
        offsets = torch.arange(queries + 1, dtype=torch.int32, device=device) * PAGE
        return attempt(lambda: prefill.attend_prefill(q, cached.pools[0], paged, offsets, plan))
    cached = cache(shape, 1, 2048, 1, torch.device(device))
    paged = Paged(cached.table, cached.lanes, torch.full_like(cached.lanes, 600), PAGE)
    q = torch.zeros(queries, shape.heads, shape.dim, dtype=TYPE, device=device)
    for programs in (1, 24, 72, 264):  # no split, then 3, 9 and 33 stretches to combine
        cut = replace(plan, programs=programs)
        if problem := attempt(lambda cut=cut: attention.attend(q, cached.pools[0], paged, queries, 4096, True, cut)):
            return problem
    return None


def measure_copy(report: Report, nbytes: int = 4 << 30) -> None:
    """Measure the device's copy, bytes read and written."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=report.device)
    target = torch.empty_like(source)
    target.copy_(source)
    report.copy = 2 * nbytes / graph_seconds(lambda: target.copy_(source), 7)
    report.document["copy_GB_s"] = round(report.copy / 1e9)
    report.say(f"copy {report.copy / 1e12:.2f} TB/s")


def measure_linears(report: Report, model: Model, all_rows: Sequence[int], until: float) -> dict[int, dict[str, Plan]]:
    """Time every kernel of the sweep; return the fastest by rows and name."""
    best: dict[int, dict[str, Plan]] = {}
    for rows in all_rows:
        for name, group in model.layers.items():
            if time.monotonic() - report.began > until:
                report.say(f"linear {name} at {rows} rows: no time left")
                continue
            product = group[0].product
            timed = time_plans([each.product for each in group], rows, sweep(bucket(rows), product.columns), 5)
            working = sorted((each for each in timed if each.seconds), key=lambda each: each.seconds or 0.0)
            best.setdefault(rows, {})[name] = working[0].plan
            nbytes = 2 * (product.weight.numel() + rows * (product.weight.shape[1] + product.columns))
            library = next(each.seconds for each in working if isinstance(each.plan, Library))
            for place, each in enumerate(working):
                row = {"name": name, "rows": rows, "place": place, "plan": spell(each.plan)}
                row["library"] = round((library or 0) / (each.seconds or 1), 2)
                report.add("linear", row, nbytes, each.seconds)
            for each in timed:
                if each.problem:
                    report.add(
                        "linear", {"name": name, "rows": rows, "plan": spell(each.plan), "problem": each.problem}
                    )
    return best


def spell(plan: Plan) -> str:
    """Return a kernel's settings in short."""
    given = {key: value for key, value in asdict(plan).items() if key != "kind" and value is not False}
    return plan.kind + " " + " ".join(f"{key}={value}" for key, value in given.items())


SWEPT = ((1, 32768, 1), (1, 32768, 16), (1, 512, 1), (1, 512, 16), (48, 512, 8), (8, 512, 16))
ATTEND_PLANS = (
    AttendPlan(), AttendPlan(64, 4, 4), AttendPlan(128, 4, 3), AttendPlan(32, 4, 4), AttendPlan(64, 4, 3, 132),
    AttendPlan(64, 4, 3, 528), AttendPlan(128, 8, 3),
)  # fmt: skip
PREFILL_PLANS = (PrefillPlan(), PrefillPlan(64, 64, 4, 3), PrefillPlan(128, 128, 8, 2), PrefillPlan(128, 64, 8, 2))


def time_call(report: Report, part: str, row: dict[str, Any], nbytes: float | None, repeat: int, call: Call) -> float:
    """Time `call`, which does its work `repeat` times; keep the row; return seconds of once, 0 if it cannot run."""
    problem = attempt(call)
    if problem:
        report.add(part, row | {"problem": problem})
        return 0.0
    seconds = graph_seconds(call, 5) / repeat
    report.add(part, row, nbytes, seconds)
    return seconds


def measure_attention(report: Report, shape: Shape, until: float) -> None:
    """Time decode and verify rows over lengths and batches; several plans in the cases that matter most."""
    every = [(b, length, q) for length in (128, 2048, 32768) for b in (1, 8, 48) for q in (1, 8, 16)]
    for case in (*SWEPT, *(case for case in every if case not in SWEPT)):
        if time.monotonic() - report.began > until:
            report.say("attention: no time left")
            return
        attention_case(report, shape, *case, ATTEND_PLANS if case in SWEPT else ATTEND_PLANS[:1])


def attention_case(
    report: Report, shape: Shape, batch: int, length: int, queries: int, plans: Sequence[AttendPlan]
) -> None:
    """Time plans, and the framework's attention over a contiguous cache (without the block's causal mask)."""
    pools = max(1, min(8, int(4e9 // (batch * length * shape.kv_heads * shape.dim * 4))))
    cached = cache(shape, batch, length + queries, pools, report.device)
    paged = Paged(cached.table, cached.lanes, torch.full_like(cached.lanes, length), PAGE)
    q = torch.randn(batch * queries, shape.heads, shape.dim, dtype=TYPE, device=report.device)
    nbytes = batch * (length + queries) * 4 * shape.kv_heads * shape.dim + 4 * q.numel()
    case = {"batch": batch, "cached": length, "queries": queries}

    def paged_attention(plan: AttendPlan) -> None:
        for pool in cached.pools:
            attention.attend(q, pool, paged, queries, length + queries, True, plan)

    for plan in plans:
        row = case | {"plan": " ".join(map(str, asdict(plan).values()))}
        time_call(report, "attend", row, nbytes, pools, partial(paged_attention, plan))
    if len(plans) == 1:
        return
    keys, values = torch.randn(2, batch, shape.kv_heads, length, shape.dim, dtype=TYPE, device=report.device)
    grouped = q.view(batch, -1, shape.heads, shape.dim).transpose(1, 2).contiguous()
    sdpa = partial(F.scaled_dot_product_attention, grouped, keys, values, enable_gqa=True)
    time_call(report, "attend", case | {"plan": "torch sdpa, contiguous, cached"}, nbytes, 1, sdpa)


def measure_prefill(report: Report, shape: Shape, until: float) -> None:
    """Time prompt chunks: one of 2048, four of 512, 512 after 2048 cached; operations over seconds as TFLOP/s."""
    for starts, sizes in (([0], [2048]), ([0] * 4, [512] * 4), ([2048], [512])):
        if time.monotonic() - report.began > until:
            report.say("prefill: no time left")
            return
        cached = cache(shape, len(starts), starts[0] + sizes[0], 1, report.device)
        lengths = torch.tensor(starts, dtype=torch.int32, device=report.device)
        paged = Paged(cached.table, cached.lanes, lengths, PAGE)
        offsets = torch.tensor([0, *sizes], device=report.device).cumsum(0).int()
        q = torch.randn(sum(sizes), shape.heads, shape.dim, dtype=TYPE, device=report.device)
        pairs = sum(size * (begin + size / 2) for begin, size in zip(starts, sizes, strict=True))
        for plan in PREFILL_PLANS:
            row = {"cached": starts[0], "chunks": len(sizes), "rows": sum(sizes)}
            row |= {"plan": " ".join(map(str, asdict(plan).values()))}
            call = partial(prefill.attend_prefill, q, cached.pools[0], paged, offsets, plan)
            if seconds := time_call(report, "prefill", row, None, 1, call):
                report.say(f"          {4 * pairs * shape.heads * shape.dim / seconds / 1e12:.0f} TFLOP/s")


def measure_rows(report: Report, shape: Shape, all_rows: Sequence[int], until: float) -> None:
    """Time the small kernels, twenty of each in a graph: mostly what a launch and the caches cost."""
    ops, device = TritonOps(report.device), report.device
    weight, head = torch.ones(shape.hidden, dtype=TYPE, device=device), torch.ones(shape.dim, dtype=TYPE, device=device)
    pool = cache(shape, 1, 1024, 1, device).pools[0]
    cos_sin = torch.rand(1024, shape.dim, device=device)
    for rows in all_rows:
        x = torch.randn(rows, shape.hidden, dtype=TYPE, device=device)
        qkv = torch.randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim, dtype=TYPE, device=device)
        gate_up = torch.randn(rows, 2 * shape.inner, dtype=TYPE, device=device)
        logits = torch.randn(rows, shape.vocab, dtype=TYPE, device=device)
        at = torch.arange(rows, device=device, dtype=torch.int32)
        calls: dict[str, tuple[int, Call]] = {
            "add_norm": (8 * x.numel(), partial(ops.add_norm, x, x, weight, EPS)),
            "rope_write": (4 * qkv.numel(), partial(ops.rope_write, qkv, head, head, EPS, cos_sin, at, pool, at)),
            "silu_mul": (3 * gate_up.numel(), partial(ops.silu_mul, gate_up)),
            "argmax": (2 * logits.numel(), partial(ops.argmax, logits)),
            "torch argmax": (2 * logits.numel(), partial(torch.argmax, logits, -1)),
        }
        for name, (nbytes, call) in calls.items():
            if time.monotonic() - report.began > until:
                return
            time_call(report, "rows", {"name": name, "rows": rows}, nbytes, 20, partial(repeatedly, 20, call))


def repeatedly(times: int, call: Call) -> None:
    for _ in range(times):
        call()


def blocks(rows: int) -> tuple[int, int]:
    """Return how many requests have how many of the rows."""
    queries = min(rows, 16)
    return rows // queries, queries


def check_step(report: Report, model: Model, best: dict[int, dict[str, Plan]]) -> None:
    """Compare two layers and the head with the reference, and with themselves in further runs."""
    for rows, plans in best.items():
        if len(plans) < len(model.layers):
            continue
        step = model.step(*blocks(rows), 300, layers=2)
        expected = model.reference(step).double()
        ops = model.use(plans, rows)
        made = step(ops)
        error = float((made.double() - expected).norm() / expected.norm())
        same = all(torch.equal(step(ops), made) for _ in range(20))
        report.add("check", {"rows": rows, "error": round(error, 5), "repeats_equal": same})
        if error > 0.01 or not same:
            report.document["failed"] = True


def measure_token(report: Report, model: Model, best: dict[int, dict[str, Plan]], length: int = 300) -> None:
    """Time the linears of all layers and head, and whole decode steps with them, in one graph each."""
    nbytes = 2 * sum(each.product.weight.numel() for each in model.every())
    for rows, plans in best.items():
        if len(plans) < len(model.layers):
            continue
        inputs = {
            name: torch.randn(rows, group[0].product.weight.shape[1], dtype=TYPE, device=report.device)
            for name, group in model.layers.items()
        }

        def linears(inputs: dict[str, Tensor] = inputs) -> None:
            for index in range(model.shape.layers):
                for name in ("qkv", "out", "gate_up", "down"):
                    layer, x = model.layers[name][index], inputs[name]
                    _ = layer.add(x, inputs["qkv"]) if name in ("out", "down") else layer(x)
            model.layers["head"][0](inputs["head"])

        step = model.step(*blocks(rows), length)
        library: dict[str, Plan] = dict.fromkeys(model.layers, Library())
        for title, chosen in (("library", library), ("chosen", plans)):
            ops = model.use(chosen, rows)
            linears()
            report.add("token", {"what": f"linears, {title}", "rows": rows}, nbytes, graph_seconds(linears, 7))
            step(ops)
            seconds = graph_seconds(partial(step, ops), 7)
            report.add("token", {"what": f"step, {title}", "rows": rows, "cached": length}, nbytes, seconds)


def run(report: Report, shape: Shape, budget: float, tests: bool, workers: int) -> None:
    """Run all parts; each ends at its share of the budget."""
    tested = start_tests(workers // 2) if tests else None
    model = Model(shape, report.device)
    kinds = {(norm, gated, out >= 8192) for _, (out, _, norm, gated) in shape.products().items()}
    jobs = {
        (plan, rows, norm, gated)
        for norm, gated, wide in kinds
        for rows in (1, 16, 64, 128)
        for plan in sweep(rows, 8192 if wide else 1)
    }
    report.say(f"compiling {len(jobs)} linear kernels in {workers} processes")
    device = str(report.device)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = [pool.submit(compile_one, *job, device) for job in sorted(jobs, key=repr)]
        made += [pool.submit(compile_attention, plan, q, shape, device) for plan in ATTEND_PLANS for q in (1, 8, 16)]
        made += [pool.submit(compile_attention, plan, n, shape, device) for plan in PREFILL_PLANS for n in (1, 4)]
        problems = [problem for each in made if (problem := each.result())]
        report.say(f"compiled; {len(problems)} cannot run here")
        if tested is not None:
            output = tested.communicate(timeout=budget)[0]
            report.document["tests"] = {"passed": tested.returncode == 0, "output": output[-4000:]}
            report.say(output.strip()[-3000:])
    measure_copy(report)
    best = measure_linears(report, model, (1, 16, 64, 128), 0.65 * budget)
    check_step(report, model, best)
    measure_token(report, model, best)
    del model
    measure_attention(report, shape, 0.88 * budget)
    measure_prefill(report, shape, 0.94 * budget)
    measure_rows(report, shape, (1, 16, 128, 384), budget)
    summary(report)


def summary(report: Report) -> None:
    """Print what decides, last."""
    report.say("---- fastest linear by shape and rows")
    for row in report.document.get("linear", []):
        if row.get("place") == 0:
            report.say("  ".join(f"{key}={value}" for key, value in row.items()))
    report.say("---- decode step of all layers")
    for row in report.document.get("check", []) + report.document.get("token", []):
        report.say("  ".join(f"{key}={value}" for key, value in row.items()))
    tests = report.document.get("tests")
    report.say(f"tests passed: {tests and tests['passed']}; copy {report.document.get('copy_GB_s')} GB/s")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--seconds", type=float, default=170.0, help="time the whole run aims at")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--no-tests", action="store_true", help="leave the compiled tests out")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device; the interpreted tests run anywhere: pytest tests/engine/kernels")
    report = Report(options.json, torch.device("cuda"))
    report.document |= {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": "python -m benchmarks.kernels_gpu --json OUT",
    }
    run(report, Shape(), options.seconds, not options.no_tests, options.workers)
    return 1 if report.document.get("failed") or not report.document.get("tests", {"passed": True})["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
