"""The decoding proof: exact greedy and sampled text, acceptance, growing trees, the parity gate. Full counts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from benchmarks.common import RESULTS, ROOT, bundled_prompts, passing_tests, write
from benchmarks.decoding import Case, Outcome, decode, differences, in_batches, loop_of, pairwise
from benchmarks.decoding_gate import gate_step
from benchmarks.decoding_growing import growing
from benchmarks.decoding_sampling import METHODS, Reference, holm, p_value, through_the_engine, verify_alone
from engine.bench import DECODE_CONCURRENCY, bench, decode_configs
from engine.config import BUNDLED
from engine.request import Sampling
from tests.faults.sampling import draft_probability_missing, residual_not_renormalised, temperature_high

SMOKE = ROOT / "tests" / "data" / "smoke_pair"
Step = Callable[[], dict[str, Any]]

TOKENS = 48
BLOCKS = (2, 4, 6, 8, 12, 16)
GRID = (BLOCKS, (1, 2, 3, 4), (0, 3, 7, 15, 31, 63, "auto"), (None, 1, 2, 4), (1, 16))
ALONE = 4  # prompts of a case that decodes one request at a time

# ----------------------------------------------------------------------------------------------------- greedy, float32


@cache
def plain() -> list[Outcome]:
    """The 200 bundled prompts without speculation."""
    return list(in_batches(loop_of(BUNDLED, {"kind": "none"}), bundled_prompts(), TOKENS, 16))


def shares() -> list[tuple[Case, list[int]]]:
    """Return each case with its prompts: every prompt has one at least."""
    numbers = itertools.cycle(range(len(bundled_prompts())))
    return [(case, list(itertools.islice(numbers, max(ALONE, case.batch)))) for case in pairwise(*GRID)]


def greedy(block: int) -> dict[str, Any]:
    """Every case of the pairwise-covering set that has this block size."""
    assert {number for _, share in shares() for number in share} == set(range(200))
    lengths = {}
    for case, share in shares():
        if case.block != block:
            continue
        prompts = [bundled_prompts()[number] for number in share]
        made = list(in_batches(loop_of(BUNDLED, case.draft()), prompts, TOKENS, case.batch))
        wrong = differences(made, [plain()[number] for number in share])
        assert not wrong, f"{case}: {'; '.join(wrong)}"
        name = f"layers {case.layers}, nodes {case.nodes or 'chain'}, width {case.width}, batch {case.batch}"
        lengths[name] = round(len(made) * (TOKENS - 1) / sum(each.rounds for each in made), 2)
    return {"cases": len(lengths), "tokens": TOKENS, "tokens_per_round": lengths}


def policy() -> dict[str, Any]:
    """Policies that switch drafts on and off under requests that come and go, on all 200 prompts."""
    chain, tree, off = (
        {"kind": "dflash", "block_size": 8},
        {"kind": "ddtree", "block_size": 6, "nodes": 15},
        {"kind": "none"},
    )
    tables = [
        [[1, 3, tree], [4, 9, chain], [10, None, off]],
        [[1, 4, off], [5, 12, tree], [13, None, chain | {"layers": 2}]],
    ]
    prompts = bundled_prompts()
    lengths = [8 + (number * 29) % (TOKENS - 7) for number in range(len(prompts))]
    for table in tables:
        loop = loop_of(BUNDLED, {"kind": "policy", "by_running": table})
        for first in range(0, len(prompts), 40):  # each group drains, so the load falls through every entry
            made = decode(loop, prompts[first : first + 40], lengths[first : first + 40])
            cut = [
                each.text[:n] for each, n in zip(plain()[first : first + 40], lengths[first : first + 40], strict=True)
            ]
            assert [each.text for each in made] == cut, f"prompts {first} to {first + 39}: a text differs"
    return {"prompts": len(prompts), "policies": len(tables)}


def acceptance() -> dict[str, Any]:
    """Rounds of each request in a batch of 16 and alone, float32."""
    prompts, found = bundled_prompts()[:32], {}
    for name, draft in {
        "dflash 8": {"kind": "dflash", "block_size": 8},
        "dflash 16": {"kind": "dflash", "block_size": 16},
        "ddtree 8, 15 nodes": {"kind": "ddtree", "block_size": 8, "nodes": 15},
        "ddtree 16, 31 nodes": {"kind": "ddtree", "block_size": 16, "nodes": 31},
    }.items():
        loop = loop_of(BUNDLED, draft)
        together = list(in_batches(loop, prompts, TOKENS, 16))
        alone = list(in_batches(loop, prompts, TOKENS, 1))
        rounds = [(a.rounds, b.rounds) for a, b in zip(together, alone, strict=True)]
        assert together == alone, f"{name}: rounds in the batch and alone differ: {rounds}"
        found[name] = round(len(prompts) * (TOKENS - 1) / sum(each.rounds for each in alone), 3)
    return {"prompts": len(prompts), "tokens_per_round": found}


# ------------------------------------------------------------------------------------------------------------- sampled

ALONE_DRAWS, ENGINE_DRAWS, ALPHA = 200_000, 20_000, 0.001
ALONE_SETTINGS = (
    Sampling(1.0),
    Sampling(0.7),
    Sampling(2.0),
    Sampling(1.3, top_k=3),
    Sampling(1.0, top_p=0.8),
    Sampling(0.9, top_k=4, top_p=0.9),
)
ENGINE_SETTINGS = (Sampling(1.0), Sampling(0.7, top_k=20), Sampling(1.0, top_p=0.9), Sampling(1.3, 40, 0.95))
MODEL = str(SMOKE / "draft")
CHAIN = {"kind": "dflash", "model": MODEL, "block_size": 4}
TREE = {"kind": "ddtree", "model": MODEL, "block_size": 4, "nodes": 9}
ENGINE_DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": CHAIN,
    "dflash, drawn": CHAIN | {"sample": "probabilistic"},
    "ddtree": TREE,
    "policy": {"kind": "policy", "by_running": [[1, 40, CHAIN], [41, None, TREE]]},
}


def sampled_alone() -> dict[str, Any]:
    """200,000 draws of two tokens by verification alone, for every setting and way of drafting."""
    found = {(s, m): verify_alone(s, m, ALONE_DRAWS) for s, m in itertools.product(ALONE_SETTINGS, METHODS)}
    assert all(length > 1.1 for _, length in found.values()), "nothing is accepted: the experiment tests nothing"
    return _judged({f"{how} {method}": p for (how, method), (p, _) in found.items()}, ALONE_DRAWS)


@cache
def reference() -> Reference:
    """The smoke target by Transformers, after the prompt of the experiment."""
    return Reference(SMOKE / "target", _prompt())


def _prompt() -> tuple[int, ...]:
    """Return a prompt after which drafts are often accepted: where none is, nothing is tested."""
    return tuple(json.loads((SMOKE / "prompts.json").read_text())[14]["token_ids"][:12])


def draws(draft: str, setting: Sampling) -> tuple[float, int, float]:
    """Return p of 20,000 texts of three tokens, tokens outside top-k and top-p, and the accept length."""
    loop = loop_of(str(SMOKE / "target"), ENGINE_DRAFTS[draft], max_running=64)
    made = through_the_engine(loop, _prompt(), setting, ENGINE_DRAWS)
    cells = reference().cells(setting, 3, 5 / ENGINE_DRAWS)
    length = loop.stats().acceptance["accept_length"]
    assert isinstance(length, float)
    return p_value(made, cells), reference().outside(made, setting), length


def sampled_by_engine() -> dict[str, Any]:
    """20,000 texts through the engine for every setting and drafter."""
    found = {(s, d): draws(d, s) for s, d in itertools.product(ENGINE_SETTINGS, ENGINE_DRAFTS)}
    outside = {f"{how} {draft}": count for (how, draft), (_, count, _) in found.items() if count}
    assert not outside, f"tokens outside top-k or top-p: {outside}"
    lengths = {f"{how} {draft}": round(length, 2) for (how, draft), (_, _, length) in found.items()}
    judged = _judged({f"{s} {d}": p for (s, d), (p, _, _) in found.items()}, ENGINE_DRAWS)
    assert min(lengths.values()) > 1.1, f"nothing is accepted: {lengths}; {judged}"
    return judged | {"accept_length": lengths}


def _judged(p_values: dict[str, float], count: int) -> dict[str, Any]:
    rejected = [list(p_values)[index] for index in holm(list(p_values.values()), ALPHA)]
    assert not rejected, f"refuted at {ALPHA}: {[(name, p_values[name]) for name in rejected]}"
    return {
        "draws": count,
        "settings": len(p_values),
        "holm": ALPHA,
        "p": {k: round(v, 4) for k, v in p_values.items()},
    }


def mutations() -> dict[str, Any]:
    """Each sampling mistake is refuted beyond doubt, by verification alone and through the engine."""
    found = {}
    for fault in (temperature_high, residual_not_renormalised, draft_probability_missing):
        with fault.applied():
            found[f"{fault.name}, verify alone"] = verify_alone(Sampling(1.0), "drawn", ALONE_DRAWS)[0]
            loop = loop_of(str(SMOKE / "target"), ENGINE_DRAFTS["dflash, drawn"], max_running=64)
            made = through_the_engine(loop, _prompt(), Sampling(1.0), ENGINE_DRAWS)
        found[f"{fault.name}, engine"] = p_value(made, reference().cells(Sampling(1.0), 3, 5 / ENGINE_DRAWS))
    missed = {name: p for name, p in found.items() if p >= 1e-6}
    assert not missed, f"not refuted: {missed}"
    return {"p": found}


# --------------------------------------------------------------------------------------------------------------- speed


def decode_bench() -> dict[str, Any]:
    """`python -m engine bench --decode` on this machine; its record is benchmarks/results/decode_cpu.json."""
    result = bench(decode_configs(), bundled_prompts(), DECODE_CONCURRENCY, 64, 5)
    write(RESULTS / "decode_cpu.json", result)
    return {
        name: {str(level["concurrency"]): round(level["tok_s_p50"]) for level in report["levels"]}
        for name, report in result["configs"].items()
    }


# --------------------------------------------------------------------------------------------------------------- tests

TESTS = ("tree", "policy", "stops", "exactness", "sampling", "verify", "kv_cache", "speculate")


def unit_tests() -> dict[str, Any]:
    """The decoding tests: both tree builders, stops inside a block, policies, every combination on the smoke pair."""
    return passing_tests(*(f"tests/engine/test_{name}.py" for name in TESTS))


STEPS: dict[str, Step] = {
    "unit tests": unit_tests,
    **{f"greedy, block {block}": partial(greedy, block) for block in BLOCKS},
    "greedy, policies": policy,
    "acceptance in a batch": acceptance,
    "sampled, verify alone": sampled_alone,
    "sampled, through the engine": sampled_by_engine,
    "sampled, mutations": mutations,
    **{f"nodes: auto, {count} requests": partial(growing, count) for count in DECODE_CONCURRENCY},
    "decode bench": decode_bench,
    "parity gate": gate_step,
}
