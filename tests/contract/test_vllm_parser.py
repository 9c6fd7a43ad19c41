"""The recorded vLLM command lines, read by vLLM's own parser. Opted in (`-m vllm`) where vLLM can be imported."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

GOLDEN = sorted((Path(__file__).parents[1] / "data" / "golden").glob("vllm-0.33.0-*.txt"))


@pytest.mark.vllm
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_vllm_reads_what_is_written_for_it(path: Path) -> None:
    parsers = importlib.import_module("vllm.utils.argparse_utils")
    options = importlib.import_module("vllm.entrypoints.common.cli_args")
    parser = options.make_arg_parser(parsers.FlexibleArgumentParser())
    lines = path.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if line.startswith("--") for word in line.split(" ", 1)]
    read = parser.parse_args(words)
    assert read.max_num_seqs in (16, 32)
    if "dflash" in path.stem or "policy" in path.stem:
        asked = read.speculative_config
        asked = json.loads(asked) if isinstance(asked, str) else asked
        assert (asked["method"], asked["num_speculative_tokens"]) == ("dflash", 15)
        assert asked["rejection_sample_method"] == "standard"
