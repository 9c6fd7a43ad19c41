"""Which linear kernel is fastest here: measured once a shape and machine, on the model's own weights, and remembered.

All layers of one shape are run one after the other in a CUDA graph, as a forward runs them: weights beyond the cache
come from memory, those of a small model stay in the cache, and both are measured as they will be used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import triton
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from triton.errors import TritonError

from engine.events import emit
from engine.kernels import linear
from engine.kernels.launch import power_of_two
from engine.kernels.linear import Library, Plan, Product, Stream, Vector

LAYERS = 12  # of one shape that a measurement runs
REPLAYS = 7
THREADS = max(1, min(16, os.cpu_count() or 1))
LARGEST_STREAM = 64  # rows from which the arithmetic decides, and the library's kernels are the better ones

_plans: TypeAdapter[dict[str, Plan]] = TypeAdapter(dict[str, Annotated[Plan, Field(discriminator="kind")]])


def bucket(rows: int) -> int:
    """Return the number of rows whose choice holds for `rows`: 1, or a power of two from 16 on."""
    return 1 if rows == 1 else power_of_two(rows, 16)


class TritonLinear:
    """A product, and the kernel chosen for every bucket of rows; the library's until something is chosen."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.plans: dict[int, Plan] = {}

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, None)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._run(x, residual)

    def _run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        plan = self.plans.get(bucket(x.shape[0]), Library())
        return plan(self.product, x, residual)


def candidates(product: Product, rows: int) -> tuple[Plan, ...]:
    """Return the kernels worth measuring for a bucket of rows: what won somewhere in a sweep of many more."""
    if product.weight.dtype != torch.bfloat16 or rows > LARGEST_STREAM:
        return (Library(),)
    wide = product.columns >= 8192  # enough outputs to fill the chip without splitting
    if rows == 1:
        return (Vector(16, 256, 1, 4, 4), Vector(8, 512, 1, 4, 4), Vector(8, 512, 1, 4, 1), Library())
    if rows <= 16:
        whole = Stream(16, 32, 256, 1, 4, 4, norm_first=True)
        if wide:
            return (Stream(16, 64, 128, 1, 4, 4, swap=True), Stream(16, 128, 64, 1, 4, 5, swap=True), whole, Library())
        return (Stream(16, 16, 256, 1, 4, 4), Stream(16, 64, 128, 4, 4, 4, swap=True), whole, Library())
    if rows <= 32:
        split = 1 if wide else 2
        return (
            Stream(32, 32, 128, split, 4, 4),
            Stream(32, 64, 128, 2 * split, 4, 4),
            Stream(32, 64, 128, 2 * split, 4, 4, swap=True),
            Library(),
        )
    if wide:
        return (Stream(64, 128, 64, 1, 4, 4), Stream(64, 64, 128, 1, 4, 3), Library())
    return (Stream(64, 64, 64, 4, 4, 5), Stream(64, 64, 128, 4, 4, 3), Library())


@dataclass(frozen=True)
class Timed:
    """A kernel's time for one product, in seconds; None when it cannot run here, and why."""

    plan: Plan
    seconds: float | None
    problem: str | None = None


@dataclass
class Book:
    """Choices made before, in a JSON file of this machine, these versions and these kernels."""

    path: Path
    choices: dict[str, Plan] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device) -> Book:
        """Open the book of a device; one that cannot be read is started anew."""
        name = torch.cuda.get_device_name(device)
        source = Path(linear.__file__).read_bytes() + Path(__file__).read_bytes()
        about = f"{name}|{torch.__version__}|{triton.__version__}".encode() + source
        path = cache_folder() / f"linear-{hashlib.sha256(about).hexdigest()[:16]}.json"
        try:
            return cls(path, _plans.validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            return cls(path)

    def save(self) -> None:
        """Write the file, whole or not at all, with what another process wrote meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            kept = _plans.validate_json(self.path.read_bytes())
        except (OSError, ValidationError):
            kept = {}
        self.choices = kept | self.choices
        text = json.dumps({key: asdict(plan) for key, plan in self.choices.items()}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(self.path)


def cache_folder() -> Path:
    """Return where measured choices are kept: $XDG_CACHE_HOME/dflash-tuner, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflash-tuner"


def key_of(product: Product, rows: int) -> str:
    """Return what a choice depends on, as the book spells it."""
    out, inner = product.weight.shape
    about = [f"{rows}x{inner}x{out}", str(product.weight.dtype).removeprefix("torch.")]
    about += ["norm"] * (product.eps is not None) + ["gated"] * product.gated + ["bias"] * (product.bias is not None)
    return " ".join(about)


def choose(layers: Iterable[TritonLinear], rows: Sequence[int], book: Book) -> None:
    """Give every layer its kernel for these numbers of rows, measuring what the book does not know."""
    groups: dict[str, tuple[int, list[TritonLinear]]] = {}
    for layer in layers:
        for size in sorted({bucket(each) for each in rows}):
            groups.setdefault(key_of(layer.product, size), (size, []))[1].append(layer)
    unknown = {key: group for key, group in groups.items() if key not in book.choices}
    measured = [(key, [layer.product for layer in group], size) for key, (size, group) in unknown.items()]
    compile_all([(products[0], size, candidates(products[0], size)) for _, products, size in measured])
    for key, products, size in measured:
        plans = candidates(products[0], size)
        if len(plans) == 1:
            book.choices[key] = plans[0]
            continue
        timed = [each for each in time_plans(products, size, plans) if each.seconds is not None]
        book.choices[key] = min(timed, key=lambda each: each.seconds or 0.0).plan
    if measured:
        try:
            book.save()
        except OSError as error:
            emit("kernels_not_kept", path=str(book.path), reason=str(error), advice="every start measures them again")
    for key, (size, group) in groups.items():
        for layer in group:
            layer.plans[size] = book.choices[key]


def compile_all(work: Sequence[tuple[Product, int, Sequence[Plan]]]) -> None:
    """Run every kernel once, so that all are compiled: many at a time, as most of a compilation is outside Python."""

    def once(product: Product, rows: int, plan: Plan) -> None:
        x, residual = _inputs(product, rows)
        attempt(lambda: plan(product, x, residual))

    jobs: dict[tuple[object, ...], tuple[Product, int, Plan]] = {}  # shapes of one kind share a compilation
    for product, rows, plans in work:
        for plan in plans if len(plans) > 1 else ():
            if isinstance(plan, Library):  # nothing to compile, and every thread would have it take a workspace
                continue
            kind = (plan, product.eps is None, product.gated, product.bias is None)
            jobs.setdefault(kind, (product, rows, plan))
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(once, *job) for job in jobs.values()]:
            done.result()


def time_plans(products: Sequence[Product], rows: int, plans: Sequence[Plan], replays: int = REPLAYS) -> list[Timed]:
    """Time kernels on products of one shape, run in order in a CUDA graph."""
    products = products[:LAYERS]
    x, residual = _inputs(products[0], rows)
    timed = []
    for plan in plans:

        def forward(plan: Plan = plan) -> None:
            for product in products:
                plan(product, x, residual)

        problem = attempt(forward)
        seconds = None if problem else graph_seconds(forward, replays) / len(products)
        timed.append(Timed(plan, seconds, problem))
    return timed


def attempt(call: Callable[[], object]) -> str | None:
    """Run a kernel once and wait; return why it cannot run on this device, None when it can."""
    try:
        call()
        torch.cuda.synchronize()
    except TritonError as error:  # too much shared memory, or what the compiler does not take
        return str(error)
    return None


def graph_seconds(call: Callable[[], object], replays: int) -> float:
    """Return the median time of a call captured into a CUDA graph; its kernels must be compiled."""
    stream, graph = _side_stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # the library takes its workspace outside the graph
        graph.capture_begin()
        try:
            call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """Return the stream that captures: one, as the library keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream()


def _inputs(product: Product, rows: int) -> tuple[Tensor, Tensor | None]:
    """Return random rows, and a residual where the product can be a layer's output."""
    out, inner = product.weight.shape
    x = torch.randn(rows, inner, dtype=product.weight.dtype, device=product.weight.device)
    if product.eps is not None or product.gated:
        return x, None
    return x, torch.randn(rows, out, dtype=x.dtype, device=x.device)
