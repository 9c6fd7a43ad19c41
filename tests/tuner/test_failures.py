from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import EngineError, Exit
from tuner import failures, symptoms
from tuner.failures import ADVICE, EXIT_KINDS, Remains, classify, engine_word, from_error, from_trace
from tuner.records import FailureKind, Stage
from tuner.supervise import Exit as Ended


def word(code: int, kind: str, message: str = "") -> str:
    return json.dumps({"event": "exit", "code": code, "kind": kind, "message": message})


def all_errors(kind: type[EngineError] = EngineError) -> list[type[EngineError]]:
    return [kind, *(deeper for below in kind.__subclasses__() for deeper in all_errors(below))]


def test_every_kind_has_advice() -> None:
    assert set(ADVICE) == set(get_args(FailureKind))
    assert all(ADVICE.values())


@pytest.mark.parametrize("error", all_errors())
def test_every_word_of_our_engine_is_understood(error: type[EngineError]) -> None:
    tail = f"loading\n{word(int(error.exit), error.kind, 'lower memory.kv_tokens to 512')}\n"
    failure = classify(Remains("launch", exit=Ended(int(error.exit), None), tail=tail))
    assert failure.kind == error.kind
    assert tail.splitlines()[1] in failure.evidence
    if error.kind != "crashed":
        assert "lower memory.kv_tokens to 512" in failure.advice


def test_exit_codes_agree_with_the_engine() -> None:
    assert set(EXIT_KINDS) == {int(code) for code in Exit} - {int(Exit.OK), int(Exit.INTERNAL)}
    for error in all_errors():
        if error.exit != Exit.INTERNAL and error.kind in EXIT_KINDS.values():
            assert EXIT_KINDS[int(error.exit)] == error.kind


@pytest.mark.parametrize(("code", "kind"), list(EXIT_KINDS.items()))
def test_a_code_without_its_line_still_counts_for_our_engine_only(code: int, kind: str) -> None:
    ours = classify(Remains("launch", exit=Ended(code, None), tail='{"event": "listening", "port": 1}\nwhat'))
    assert ours.kind == kind
    assert classify(Remains("launch", exit=Ended(code, None), tail="a stranger's log")).kind == "crashed"


@pytest.mark.parametrize("stage", ["parity", "load"])
def test_memory_that_runs_out_later_is_another_failure(stage: Stage) -> None:
    assert classify(Remains(stage, exit=Ended(4, None), tail=word(4, "oom_start"))).kind == "oom_load"
    assert classify(Remains(stage, tail="torch.OutOfMemoryError: CUDA out of memory.")).kind == "oom_load"


def test_what_the_tuner_saw_goes_before_the_log() -> None:
    failure = classify(Remains("ready", "it serves gpt2", "wrong_model", None, "CUDA out of memory. Tried to allocate"))
    assert failure.kind == "wrong_model"
    assert failure.evidence[0] == "it serves gpt2"


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.30 GiB."
STALL = "not ready after 900 s: it does not listen yet"


@pytest.mark.parametrize(("stage", "kind"), [("launch", "oom_start"), ("ready", "oom_start"), ("load", "oom_load")])
def test_a_stall_has_the_cause_that_the_log_names(stage: Stage, kind: FailureKind) -> None:
    failure = classify(Remains(stage, STALL, "no_progress", None, f"{OOM}\nwaiting for the other ranks"))
    assert failure.kind == kind
    assert "short by 2.3 GiB" in failure.advice
    assert (failure.evidence[0], failure.evidence[-1]) == (STALL, OOM)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("launch", f"WARNING 01-01 00:00:00 retrying with a smaller batch: {OOM}"),
        ("launch", "Scheduler watchdog timeout (watchdog_timeout=300.0)"),
        ("launch", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356"),
        ("load", "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."),
    ],
    ids=["handled", "a stall", "a consequence", "survived"],
)
def test_what_does_not_explain_a_stall_leaves_it_one(stage: Stage, line: str) -> None:
    failure = classify(Remains(stage, STALL, "no_progress", None, line))
    assert (failure.kind, failure.advice) == ("no_progress", ADVICE["no_progress"])


LOGS: list[tuple[str, str]] = [
    ("oom_start", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.30 GiB. GPU 0 has 79 GiB"),
    ("oom_start", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    ("oom_start", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ("oom_start", "[E] Out of memory: Killed process 4242 (python)"),
    ("oom_capture", "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.00 GiB"),
    ("graph_capture", "Exception: Capture cuda graph failed: 'NoneType' object has no attribute 'shape'"),
    ("graph_capture", "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
    ("graph_capture", "torch.AcceleratorError: CUDA error: cudaErrorStreamCaptureInvalidated"),
    ("kernel_compile", "triton.compiler.errors.CompilationError: at 12:4:"),
    ("kernel_compile", "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ("kernel_compile", "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."),
    ("distributed_init", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356"),
    ("distributed_init", "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms"),
    (
        "port",
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
    ),
    ("port", "OSError: [Errno 98] Address already in use"),
    ("disk_full", "OSError: [Errno 28] No space left on device: '/tmp/x'"),
    ("gated_model", "huggingface_hub.errors.GatedRepoError: 403 Client Error."),
    ("gated_model", "Access to model meta-llama/Llama-3.1-8B is restricted and you are not in the authorized list."),
    ("unsupported_model", "ValueError: Model architectures ['FooForCausalLM'] are not supported for now."),
    ("unsupported_model", "Please pass the argument `trust_remote_code=True` to allow custom code to be run."),
    ("missing_file", "FileNotFoundError: [Errno 2] No such file or directory: '/models/x/config.json'"),
    (
        "missing_file",
        "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
    ),
    ("missing_file", "OSError: org/x is not a local folder and is not a valid model identifier listed on the hub"),
    ("config", "launch_server.py: error: ambiguous option: --cuda-graph-bs could match --cuda-graph-bs-decode"),
    ("config", "vllm: error: unrecognized arguments: --speculative-dflash-draft-window-size 64"),
    ("garbage_output", "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"),
    ("distributed_init", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"),
    ("no_progress", "[2026-01-01 00:00:00] Scheduler watchdog timeout (watchdog_timeout=300.0)"),
    ("kernel_compile", "Exception: Capture cuda graph failed: out of resource: shared memory, Required: 131072, …"),
    ("kernel_compile", "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"),
    ("kernel_compile", "/usr/include/x.h:3:10: fatal error: cuda_runtime.h: No such file or directory"),
    ("oom_start", "\x1b[1;36m(Worker pid=1)\x1b[0;0m RuntimeError: CUDA driver error: out of memory"),
    (
        "foreign_gpu_process",
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
    ),
    ("config", "ValueError: Total number of attention heads (52) must be divisible by tensor parallel size (3)."),
    ("unsupported_model", "ValueError: GGUF model with architecture qwen3 is not supported yet."),
    ("missing_file", "ValueError: Following weights were not initialized from checkpoint: {'lm_head.weight'}"),
    ("gated_model", "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub/x"),
    (
        "port",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address."
        " port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    ("distributed_init", "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ("oom_load", "RuntimeError: Prefill out of memory. Try to lower your batch size."),
    ("crashed", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    ("crashed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("crashed", "TypeError: 'NoneType' object is not subscriptable"),
    ("crashed", "Segmentation fault (core dumped)"),
    ("crashed", ""),
]


@pytest.mark.parametrize(("kind", "line"), LOGS)
def test_a_foreign_log_is_read(kind: str, line: str) -> None:
    tail = f"INFO starting\n{line}\nINFO: shutting down"
    failure = classify(Remains("launch", exit=Ended(1, None), tail=tail))
    assert failure.kind == kind
    assert "the server ended with exit code 1" in failure.evidence
    if line:
        assert any(line.split("\x1b")[-1][-60:] in evidence for evidence in failure.evidence)


def test_ordinary_words_name_no_cause() -> None:
    lines = [
        "INFO: memory pool ends, avail mem 12.3 GB",
        "INFO: port 30000 is listening",
        "WARNING: graph capture takes a while",
        "INFO: config loaded from /models/x/config.json",
        "WARNING: dist timeout is 600",
        "WARNING 01-01 [utils.py:1] could not find nvcc, falling back to the native sampler",
        "UserWarning: CUDA out of memory. Tried to allocate 1.00 GiB, retrying with less",
    ]
    assert symptoms.find(symptoms.Facts(None, "\n".join(lines))) is None


def test_the_last_word_decides_and_its_number_is_in_the_advice() -> None:
    early = "OSError: [Errno 98] Address already in use"
    late = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.30 GiB."
    failure = classify(Remains("launch", exit=Ended(1, None), tail=f"{early}\n{late}\n"))
    assert failure.kind == "oom_start"
    assert "2.30 GiB" in failure.advice
    limit = (
        "ValueError: The model's max seq len (8192) is larger than the maximum number of tokens that can be stored"
        " in KV cache (4096)."
    )
    assert "4096" in classify(Remains("launch", tail=limit)).advice


CAPTURE_TRACE = """\
[2026-02-01 10:00:00 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=9.31 GB
[2026-02-01 10:00:05 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 2255, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args, gpu_id, tp_rank)
  File "/x/sglang/srt/model_executor/cuda_graph_runner.py", line 663, in capture_one_batch_size
    out = run_once()
  File "/x/sglang/srt/models/dflash.py", line 88, in forward
    hidden = spec_info.hidden_states.shape[-1]
{error}
[2026-02-01 10:00:06] Received sigquit from a child process. It usually means the child failed."""


def test_a_nonetype_error_in_capture_is_named() -> None:
    error = "AttributeError: 'NoneType' object has no attribute 'shape'"
    for tail in (
        CAPTURE_TRACE.format(error=error),
        f"Exception: Capture cuda graph failed: {error.removeprefix('AttributeError: ')}\nPossible solutions:\n1. ...",
    ):
        failure = classify(Remains("launch", exit=Ended(None, 9), tail=tail))
        assert failure.kind == "graph_capture"
        assert "NoneType error while a graph was captured" in failure.advice
        assert any("'NoneType' object has no attribute 'shape'" in line for line in failure.evidence)
    done = "Capture cuda graph end. Time elapsed: 3.1 s\nTraceback (most recent call last):\n" + error
    assert classify(Remains("load", tail=f"Capture cuda graph begin.\n{done}")).kind == "crashed"


def test_memory_that_runs_out_in_capture_is_told_apart() -> None:
    error = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of"
        " 80.00 GiB of which 204.80 MiB is free. Process 4711 has 79.10 GiB memory in use."
    )
    config = EngineConfig.model_validate({"model": {"target": "x"}, "memory": {"kv_fraction": 0.85}})
    failure = classify(Remains("launch", tail=CAPTURE_TRACE.format(error=error), config=config))
    assert failure.kind == "oom_capture"
    assert failure.advice.startswith("lower memory.kv_fraction to 0.82: short by 2.3 GiB")
    plain = classify(Remains("launch", tail=f"Load weight begin.\n{error}", config=config))
    assert plain.kind == "oom_start"
    assert plain.advice.startswith("lower memory.kv_fraction to 0.82: short by 2.3 GiB")


@pytest.mark.parametrize(
    ("memory", "log", "advice"),
    [
        (
            {},
            "server_args=ServerArgs(mem_fraction_static=0.88, …)",
            "lower memory.kv_fraction to 0.85: short by 2.0 GiB",
        ),
        ({}, "", "lower memory.kv_fraction or memory.kv_tokens: short by 2.0 GiB"),
        (
            {"kv_tokens": 40000},
            "KV Cache is allocated. #tokens: 40000, K size: 5.00 GB, V size: 5.00 GB",
            "lower memory.kv_tokens to 32000: short by 2.0 GiB",
        ),
        ({"kv_tokens": 40000}, "", "lower memory.kv_tokens: short by 2.0 GiB"),
    ],
)
def test_advice_names_the_number(memory: dict[str, float], log: str, advice: str) -> None:
    config = EngineConfig.model_validate({"model": {"target": "x"}, "memory": memory})
    oom = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 0 bytes is"
    oom += " free."
    assert classify(Remains("launch", tail=f"{log}\n{oom}", config=config)).advice.startswith(advice)


@pytest.mark.parametrize(
    ("free", "kind", "advice"),
    [
        ("75.32", "oom_start", "lower memory.kv_fraction to 0.95: short by 1.9 GiB"),
        ("59.32", "foreign_gpu_process", "end the process that holds 19.8 GiB of the GPU"),
    ],
)
def test_vllm_says_how_much_is_free(free: str, kind: str, advice: str) -> None:
    line = (
        f"ValueError: Free memory on device cuda:0 ({free}/79.15 GiB) on startup is less than desired GPU memory"
        f" utilization (0.98, {77.2 if kind == 'oom_start' else 71.24} GiB). Decrease GPU memory utilization"
    )
    failure = classify(Remains("launch", tail=line))
    assert failure.kind == kind
    assert failure.advice.startswith(advice)


def test_a_hint_in_torchs_own_message_is_no_capture() -> None:
    tail = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. … in private pools (e.g., CUDA Graphs)"
    )
    assert classify(Remains("launch", tail=tail)).kind == "oom_start"
    assert classify(Remains("load", tail=tail)).kind == "oom_load"


def test_a_cause_goes_before_what_follows_from_it() -> None:
    later = [
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited",
        "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242",
        "FileNotFoundError: [Errno 2] No such file or directory: '/psm_1a2b3c'",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    assert classify(Remains("launch", tail="\n".join([oom, *later]))).kind == "oom_start"
    assert classify(Remains("launch", tail="\n".join(later))).kind == "distributed_init"
    assert classify(Remains("launch", tail=later[2])).kind == "crashed"


def test_a_dump_of_arguments_names_no_cause() -> None:
    dump = "server_args=ServerArgs(model_path='/m', trust_remote_code=True, disable_cuda_graph=False, nccl_port=None)"
    assert symptoms.find(symptoms.Facts(None, dump)) is None


def test_a_launcher_that_kills_itself_was_not_killed_by_the_kernel() -> None:
    tail = "Received sigquit from a child process. It usually means the child failed."
    assert "dmesg" not in classify(Remains("launch", exit=Ended(None, 9), tail=tail)).advice
    assert "dmesg" in classify(Remains("launch", exit=Ended(None, 9), tail="Load weight begin.")).advice


def test_what_the_server_answered_is_read_too() -> None:
    reason = '3 completions failed; the last: HTTP 500: {"message": "CUDA out of memory. Tried to allocate 1.00 GiB."}'
    assert classify(Remains("ready", reason=reason, tail="INFO: fine")).kind == "oom_start"


def test_a_word_cut_by_the_tail_is_passed_over() -> None:
    whole = word(3, "missing_file", "x")
    assert engine_word(f'{{"event": "exit", "code\n{whole}\n{{"event": "exit", "co') is not None
    assert engine_word('{"event": "exit", "code": 0, "kind": "stopped", "message": "fine"}') is None


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=300), st.sampled_from(["launch", "ready", "load", "stop"]), st.integers(-5, 300))
def test_any_log_is_a_failure_of_a_known_kind(tail: str, stage: Stage, code: int) -> None:
    failure = classify(Remains(stage, exit=Ended(code, None), tail=tail))
    assert failure.kind in get_args(FailureKind)
    assert failure.advice
    assert all(line.isprintable() and len(line) <= failures.LINE_WIDTH for line in failure.evidence)


def test_errors_of_our_own() -> None:
    assert from_error("lease", ValueError("no"), "unheard of").kind == "crashed"
    assert from_error("lease", ValueError("no"), "port", ["more"]).evidence == ("no", "more")


@pytest.mark.parametrize("kind", ["config", "no_progress"])
def test_before_a_launch_the_advice_is_about_the_machine_not_the_server(kind: FailureKind) -> None:
    failure = from_error("lease", ValueError("no lease within 3 s"), kind)
    assert "tuner doctor" in failure.advice
    assert from_error("launch", ValueError("no"), kind).advice == ADVICE[kind]
    trace = "Traceback (most recent call last):\n" + "  frame\n" * 100 + "OSError: [Errno 28] No space left on device"
    assert from_trace("launch", trace).kind == "disk_full"
    broken = from_trace("load", trace.replace("[Errno 28]", "[Errno 5]"))
    assert broken.kind == "crashed"
    assert broken.evidence[0].startswith("Traceback")
    assert len(broken.evidence) == failures.TRACE_LINES
