"""`python -m engine serve | generate | bench | show-config`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.config import BUNDLED, EngineConfig, LaunchFile, bundled, load_launch, target_folder
from engine.errors import ConfigError, EngineError, Exit
from engine.events import emit


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status (see `engine.errors.Exit`)."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except EngineError as error:
        emit("exit", code=int(error.exit), kind=error.kind, message=str(error))
        return int(error.exit)
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a config over HTTP until SIGTERM")
    serve.add_argument("config", type=Path, help="launch.yaml or an EngineConfig in YAML")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--admin-key", default=None, help="key that allows POST /policy from elsewhere than loopback")
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="continue prompts without a server")
    generate.add_argument("--config", type=Path, default=None, help="default: the bundled pair, no speculation")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--json", action="store_true", help="one JSON object a prompt, with token ids")
    generate.add_argument("prompts", nargs="+", help="texts to continue")
    generate.set_defaults(run=_generate)

    bench = commands.add_parser("bench", help="time configs offline, interleaved")
    bench.add_argument("configs", type=Path, nargs="*", help="default: the bundled pair, none and dflash 8")
    bench.add_argument(
        "--decode", action="store_true", help="the bundled pair: none, dflash, ddtree and a policy at 1, 4, 16 requests"
    )
    bench.add_argument(
        "--gpu", action="store_true", help="where a round's time goes on a GPU: draft, verify, commit, host"
    )
    bench.add_argument("--prompts", type=Path, default=None, help="JSON list of token id lists; default: bundled ones")
    bench.add_argument("--concurrency", type=int, nargs="+", default=None, help="default: 1 4")
    bench.add_argument("--output-tokens", type=int, default=128)
    bench.add_argument("--repeats", type=int, default=5)
    bench.add_argument("--json", type=Path, default=None, help="write the full result here")
    bench.set_defaults(run=_bench)

    show = commands.add_parser("show-config", help="print the resolved config, or why it cannot run here")
    show.add_argument("config", type=Path)
    show.set_defaults(run=_show)
    return parser


def _single(path: Path) -> EngineConfig:
    """Return the one config of a launch file.

    Raises:
        ConfigError: invalid, or of several entries.
    """
    launch: LaunchFile = load_launch(path)
    if len(launch.entries) > 1:
        ranges = ", ".join(f"{entry.first}–{entry.last or '∞'}" for entry in launch.entries)
        raise ConfigError(
            f"{path}: {len(launch.entries)} entries (running requests {ranges}) need several servers; "
            "serve one entry's config by itself"
        )
    return launch.entries[0].config


def _serve(arguments: argparse.Namespace) -> int:
    config = _single(arguments.config)
    if config.backend.kind != "native":
        raise ConfigError(
            f"{arguments.config}: backend {config.backend.kind} is not this server; "
            "`tuner export` prints the command of its own"
        )
    from engine.server import serve

    return serve(config, arguments.host, arguments.port, config.model.target, arguments.admin_key)


def _generate(arguments: argparse.Namespace) -> int:
    config = bundled() if arguments.config is None else _single(arguments.config)
    from engine.request import Request
    from engine.runtime import resolve
    from engine.start import build_any, loop_of
    from engine.text import Text

    plan = resolve(config)
    text = Text(target_folder(config))
    loop = loop_of(build_any(plan))
    outputs: dict[int, list[int]] = {}
    for number, prompt in enumerate(arguments.prompts):
        tokens = tuple(text.encode(prompt))
        outputs[number] = []
        reason = (
            "the prompt is empty"
            if not tokens
            else loop.submit(Request(number, tokens, arguments.max_tokens, text.eos))
        )
        if reason is not None:
            raise ConfigError(f"prompt {number}: {reason}")
    verify_counts: dict[int, int] = {}
    while not loop.idle:
        for progress in loop.advance():
            outputs[progress.id] += progress.tokens
            verify_counts[progress.id] = progress.verify_count
    for number, tokens_out in outputs.items():
        shown = text.decode(tokens_out)
        if arguments.json:
            count = verify_counts[number]
            length = (len(tokens_out) - 1) / count if count else None
            document = {"text": shown, "token_ids": tokens_out, "accept_length": length, "verify_count": count}
            print(json.dumps(document, ensure_ascii=False))
        else:
            print(arguments.prompts[number] + shown)
    return int(Exit.OK)


def _bench(arguments: argparse.Namespace) -> int:
    from engine.bench import DECODE_CONCURRENCY, bench, decode_configs

    configs = {str(path): _single(path) for path in arguments.configs}
    if arguments.gpu:
        return _bench_gpu(configs, arguments)
    if arguments.decode and configs:
        raise ConfigError("--decode brings its own configs; leave out either")
    if arguments.decode:
        configs = decode_configs()
    elif not configs:
        fast = EngineConfig.model_validate({"model": {"target": BUNDLED}, "draft": {"kind": "dflash", "block_size": 8}})
        configs = {"none": bundled(), "dflash block 8": fast}
    concurrency = arguments.concurrency or (DECODE_CONCURRENCY if arguments.decode else (1, 4))
    prompts = _prompts(arguments.prompts)
    result = bench(configs, prompts, concurrency, arguments.output_tokens, arguments.repeats)
    print(f"{'':16} {'requests':>8} {'tok/s':>7} {'accept length':>13} {'rows':>5} {'ms/round':>8}")
    for name, report in result["configs"].items():
        for level in report["levels"]:
            length = level["accept_length"]
            print(
                f"{name:16} {level['concurrency']:8} {level['tok_s_p50']:7.0f} "
                + (f"{length:13.2f}" if length else f"{'–':>13}")
                + f" {level['rows_per_request']:5.1f} {level['ms_per_round']:8.2f}"
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(Exit.OK)


def _bench_gpu(configs: dict[str, EngineConfig], arguments: argparse.Namespace) -> int:
    from engine.device.bench import TITLES, bench_gpu, line

    concurrency = arguments.concurrency or (1, 8, 48)
    if not configs:
        shared = {
            "model": {"target": BUNDLED},
            "graphs": {"kind": "captured", "batch_sizes": sorted({*concurrency})},
            "memory": {"max_running": max(concurrency)},
        }
        fast = {"draft": {"kind": "dflash", "block_size": 8}}
        configs = {
            "none": EngineConfig.model_validate(shared),
            "dflash block 8": EngineConfig.model_validate(shared | fast),
        }
    print(TITLES, flush=True)
    result = bench_gpu(
        configs, concurrency, output_tokens=arguments.output_tokens, tell=lambda row: print(line(row), flush=True)
    )
    print(f"copy {result['copy_bytes_s'] / 1e9:.0f} GB/s")
    for name, described in result["configs"].items():
        held = described["memory_check"]
        if "used" in held:
            share = f"{held['used'] / held['estimate']:.3f} of the estimate"
            print(f"{name[-24:]:24} {held['used'] / 2**30:.2f} GiB held on the device, {share}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(Exit.OK)


def _prompts(path: Path | None) -> list[tuple[int, ...]]:
    if path is None:
        from engine.pair.workload import load_workload

        return [tuple(prompt.token_ids) for prompt in load_workload()]
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        return [tuple(int(token) for token in prompt) for prompt in document]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: expected a JSON list of token id lists: {error}") from error


def _show(arguments: argparse.Namespace) -> int:
    from engine.runtime import resolve

    plan = resolve(_single(arguments.config))
    import yaml

    print(yaml.safe_dump(plan.config.model_dump(mode="json"), sort_keys=False), end="")
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main())
