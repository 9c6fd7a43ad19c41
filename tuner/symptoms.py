"""Messages of known causes, as PyTorch, CUDA, NCCL, Triton, FlashInfer, Hugging Face, SGLang, vLLM and the kernel
print them, and the numbers that they give away. Pure.

A *cause* names what went wrong; a *consequence* also follows from other causes (a rank that lost its peer, a file that
a shutdown no longer finds) and counts only where no cause is found; a *hint* is all that is left where even those are
missing. Within one line the first pattern that matches counts; lines are read from the last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from tuner.records import FailureKind

LINE_WIDTH = 1600  # of a line, that much is read: argument dumps are longer, messages are not
HANDLED = re.compile(r"(?<![=\w])(INFO|DEBUG|WARNING)\b|\w+Warning: ")  # whoever says it so lives on
DRIVER_GIB, DRIVER_SHARE = 2.0, 0.1  # of a GPU that nobody uses, in use all the same
COLOUR = re.compile(r"\x1b\[[\d;]*m")
FRAMES = 160  # lines of traceback that belong to an exception, chained ones included

GIB = {"KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 1024.0}


@dataclass(frozen=True)
class Facts:
    """What advice may be computed from: the config asked for, and the log."""

    config: EngineConfig | None
    tail: str

    @property
    def kv_fraction(self) -> float | None:
        """The share of device memory that the server used: as asked, else as it printed."""
        if self.config is not None and self.config.memory.kv_fraction is not None:
            return self.config.memory.kv_fraction
        found = re.findall(r"(?:mem_fraction_static|gpu_memory_utilization)['\"]?[=:] ?(0\.\d+)", self.tail)
        return float(found[-1]) if found else None


Advise = Callable[[re.Match[str], Facts], str]


@dataclass(frozen=True)
class Pattern:
    """A message. `advise` says what to change with the numbers of the match, or "" when it has none.

    `refine`: the kind, where it takes the numbers of the match to tell.
    """

    kind: FailureKind
    regex: re.Pattern[str]
    advise: Advise | None = None
    refine: Callable[[re.Match[str]], FailureKind] | None = None


@dataclass(frozen=True)
class Symptom:
    """A message found: its kind, the line that says so, and advice with a number, or ""."""

    kind: FailureKind
    line: str
    advice: str


def _pattern(
    kind: FailureKind,
    regex: str,
    advise: Advise | None = None,
    refine: Callable[[re.Match[str]], FailureKind] | None = None,
) -> Pattern:
    return Pattern(kind, re.compile(regex, re.IGNORECASE), advise, refine)


# ------------------------------------------------------------------------------------------------------- advice


def lower_memory(short: float, total: float | None, facts: Facts) -> str:
    """Return which memory setting to lower to what, `short` GiB of `total` GiB being missing."""
    missing = f"short by {short:.1f} GiB"
    tokens = facts.config.memory.kv_tokens if facts.config is not None else None
    if tokens is not None:
        per_token = _gib_per_token(facts.tail)
        fit = 0 if per_token is None else int(tokens - short / per_token) // 64 * 64
        return f"lower memory.kv_tokens{f' to {fit}' if fit > 0 else ''}: {missing}"
    fraction = facts.kv_fraction
    if fraction is None or total is None:
        return f"lower memory.kv_fraction or memory.kv_tokens: {missing}"
    fit_fraction = math.floor((fraction - short / total) * 100) / 100
    if fit_fraction <= 0.05:
        return f"spread the model with parallel.tensor: {missing}, more than memory.kv_fraction can give back"
    return f"lower memory.kv_fraction to {fit_fraction:.2f}: {missing}"


def _gib_per_token(tail: str) -> float | None:
    """Return the KV cache's size per token that SGLang printed."""
    found = re.findall(r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", tail)
    if not found:
        return None
    tokens, keys, values = found[-1]
    size = float(keys) + float(values)
    return size / int(tokens) if int(tokens) and size else None


def _gib(text: str) -> float:
    """Read `2.30 GiB`, or `0 bytes`."""
    number, _, unit = text.strip().partition(" ")
    return float(number) * GIB.get(unit, 2.0**-30)


def _allocation(match: re.Match[str], facts: Facts) -> str:
    wanted = _gib(match["size"])
    free = _gib(match["free"]) if match["free"] else 0.0
    total = _gib(match["total"]) if match["total"] else None
    return f"{lower_memory(max(wanted - free, 0.1), total, facts)} (an allocation of {match['size']} did not fit)"


def _whose(match: re.Match[str]) -> FailureKind:
    """vLLM looks before it loads anything: what is missing by then, but for the driver's share, is not ours."""
    free, total = float(match["free"]), float(match["total"])
    return "foreign_gpu_process" if total - free > max(DRIVER_GIB, DRIVER_SHARE * total) else "oom_start"


def _free_share(match: re.Match[str], facts: Facts) -> str:
    free, total, wanted = float(match["free"]), float(match["total"]), float(match["wanted"])
    lower = f"lower memory.kv_fraction to {math.floor(free / total * 100) / 100:.2f}: short by {wanted - free:.1f} GiB"
    if _whose(match) == "oom_start":
        return lower
    return f"end the process that holds {total - free:.1f} GiB of the GPU (`nvidia-smi` names it), or {lower}"


def _more_cache(match: re.Match[str], facts: Facts) -> str:
    now = "" if facts.kv_fraction is None else f" above {facts.kv_fraction:g}"
    return (
        f"raise memory.kv_fraction{now}, or spread the model with parallel.tensor: "
        "the weights leave no room for the cache"
    )


def _one_request(match: re.Match[str], facts: Facts) -> str:
    short = float(match["needed"]) - float(match["there"])
    return f"lower model.max_len, or raise memory.kv_fraction: the KV cache is short by {short:.1f} GiB"


def _host_memory(match: re.Match[str], facts: Facts) -> str:
    return "a process of the server was killed, by the kernel for want of host memory as a rule (`dmesg` says)"


def _longest(match: re.Match[str], facts: Facts) -> str:
    return f"set model.max_len to at most {match['fits'] or match['held']}, or give the KV cache more memory"


def _none_in_capture(match: re.Match[str], facts: Facts) -> str:
    return (
        f"NoneType error while a graph was captured ({match['none']}): search graphs: {{kind: eager}} beside it, or "
        "another attention.backend; what is None there is set only without graphs"
    )


def _shared_memory(match: re.Match[str], facts: Facts) -> str:
    return (
        f"this kernel needs {match['need']} bytes of shared memory and the GPU has {match['has']}: "
        "choose another attention.backend"
    )


def _divisible(match: re.Match[str], facts: Facts) -> str:
    return f"choose a parallel.tensor that divides {match['heads']}"


def _fewer_gpus(match: re.Match[str], facts: Facts) -> str:
    return f"lower parallel.tensor: {match['world']} ranks are asked for and {match['gpus']} GPUs are there"


def _shm(match: re.Match[str], facts: Facts) -> str:
    return "enlarge /dev/shm (in a container: --shm-size=16g or --ipc=host)"


# ------------------------------------------------------------------------------------------------------- causes

SIZE = r"[\d.]+ [KMGT]iB"
NO_SUCH = r"No such file or directory"
MODEL_FILE = r"config\.json|\.safetensors|tokenizer|\.bin\b|\.gguf|\.pt\b|/models?/|checkpoint|weights"
TOOLS = r"nvcc|ninja|gcc|g\+\+|clang|cc1plus|ptxas|cicc|\bcc\b"

CAUSES: tuple[Pattern, ...] = (
    _pattern("distributed_init", r"NCCL WARN.*(/dev/shm|shared memory).*|/dev/shm/nccl\S* .*No space left", _shm),
    _pattern(
        "disk_full",
        r"\bNo space left on device\b|\bDisk quota exceeded\b|\[Errno (28|122)\]|\bNot enough free disk space\b",
    ),
    _pattern(
        "gated_model",
        r"\bGatedRepoError\b|gated repo\b(?!sitory\?)|Access to model .{1,120} is restricted"
        r"|awaiting a review from the repo authors|Your request to access model .{1,120} is (awaiting|pending)",
    ),
    _pattern(
        "oom_capture",
        r"Captur\w+ .{0,40}graph.{0,20}failed.*out of memory|out of memory.{0,40}while captur",
    ),
    _pattern(
        "kernel_compile",
        r"Captur\w+ .{0,40}graph.{0,20}failed.*(out of resource|\bnvcc\b|\bninja\b|ptxas|compil(e|ation)\b)",
    ),
    _pattern(
        "graph_capture", r"Captur\w+ .{0,40}graph.{0,20}failed:? .*?(?P<none>'NoneType' object .*)", _none_in_capture
    ),
    _pattern(
        "graph_capture",
        r"Captur\w+ .{0,40}graph.{0,20}failed(?!.*Connection (closed|reset))"
        r"|cudaErrorStreamCapture\w+|CUDA_ERROR_STREAM_CAPTURE\w+"
        r"|operation (would make|failed due to) .*captur"
        r"|operation not permitted when (the )?stream is capturing|Failed to capture .{0,40}graph"
        r"|during CUDA graph capture|Cannot .{0,80} during (cuda )?graph capture",
    ),
    _pattern("oom_load", r"\b(Prefill|Decode) out of memory\b|out of memory even after retracting"),
    _pattern(
        "oom_start",
        rf"(CUDA|HIP|XPU) out of memory\. Tried to allocate (?P<size>{SIZE})"
        rf"(.{{0,80}}?total capacity of (?P<total>{SIZE}) of which (?P<free>{SIZE}|[\d.]+ bytes) is free)?",
        _allocation,
    ),
    _pattern(
        "oom_start",
        r"Free memory on device .{0,12}\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\).*?\([\d.]+, (?P<wanted>[\d.]+) GiB\)",
        _free_share,
        _whose,
    ),
    _pattern(
        "oom_start",
        r"estimated maximum model length is (?P<fits>\d+)"
        r"|max seq(uence)? len(gth)? \(?\d+\)? is larger than the maximum number of tokens.*KV cache \(?(?P<held>\d+)",
        _longest,
    ),
    _pattern(
        "oom_start",
        r"(?P<needed>[\d.]+) GiB KV cache is needed, which is larger than the available KV cache memory "
        r"\((?P<there>[\d.]+) GiB",
        _one_request,
    ),
    _pattern(
        "oom_start",
        r"No available memory for the cache blocks|Not enough memory\. Please try (to increase|increasing)",
        _more_cache,
    ),
    _pattern(
        "oom_start",
        r"\bOutOfMemoryError\b|\b(CUDA|HIP|XPU)( runtime| driver)?( error:)? out of memory\b"
        r"|Cuda failure .{0,12}out of memory|cudaErrorMemoryAllocation"
        r"|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|hipErrorOutOfMemory"
        r"|Not enough memory\b|DefaultCPUAllocator: (can't|not enough)|\bMemoryError\b|std::bad_alloc"
        r"|Cannot allocate memory|\[Errno 12\]|Out of memory: Killed process|oom-kill:|Memory cgroup out of memory"
        r"|is less than desired GPU memory utilization|ran out of memory|\bOOMKilled\b",
    ),
    _pattern(
        "foreign_gpu_process",
        r"memory capacity is unbalanced.*occupied by other processes"
        r"|Error in memory profiling\. Initial free memory|CUDA-capable device\(s\) is/are busy"
        r"|cudaErrorDevicesUnavailable",
    ),
    _pattern(
        "port",
        r"Address already in use|\[Errno (98|48)\]|EADDRINUSE|error while attempting to bind on address"
        r"|\bport \d+ is (already )?(in use|occupied|taken)|\bport \d+ .{0,30}not available",
    ),
    _pattern(
        "distributed_init",
        r"Duplicate GPU detected|DistStoreError|init_process_group.*(timed? ?out|failed)"
        r"|(client|server) socket has (timed out|failed)|waiting for clients\. \d+/\d+ clients joined"
        r"|torch_shm_manager|custom_all_reduce.*(invalid|not permitted)|peer access is not supported",
    ),
    _pattern(
        "kernel_compile",
        r"OutOfResources: out of resource: shared memory, Required: (?P<need>\d+), Hardware limit: (?P<has>\d+)",
        _shared_memory,
    ),
    _pattern(
        "kernel_compile",
        rf"triton\.(compiler|runtime)\.\w+\.\w+|\bCompilationError\b|OutOfResources: out of resource|PTXASError"
        rf"|ninja: (build stopped|error)|Ninja build failed|nvcc fatal|Error building extension|\bnvrtc\b.*error"
        rf"|no kernel image is available for execution|invalid device function"
        rf"|hipErrorNoBinaryForGpu|CUDA_ERROR_(NO_BINARY_FOR_GPU|UNSUPPORTED_PTX_VERSION)"
        rf"|compiled with an unsupported toolchain|Failed to find C compiler|ptxas (fatal|error)|LLVM ERROR"
        rf"|(Could not find|cannot find|unable to find) .{{0,20}}({TOOLS})\b|\b({TOOLS}): (command )?not found"
        rf"|{NO_SUCH}: '?([\w/.-]*/)?({TOOLS})'?$|CUDA_HOME environment variable is not set"
        rf"|fatal error: [\w/.]+\.(h|hpp|cuh): {NO_SUCH}|\bInductorError\b|BackendCompilerFailed"
        rf"|NVCC compilation failed|JIT compilation failed|Failed to compile|compute_\d+\w?' is not supported"
        rf"|CalledProcessError: Command '?\[?'?\S*({TOOLS})",
    ),
    _pattern(
        "unsupported_model",
        r"Model architectures? .{1,200} (is|are|failed to be) (not supported|inspected)"
        r"|Unsupported (model )?architecture"
        r"|does not recognize this architecture|Unrecognized (model in|configuration class)"
        r"|(argument|option) `trust_remote_code=True`|set .{0,30}trust_remote_code.{0,10} to True"
        r"|(Unknown|Unsupported|Invalid) quantization( method)?|quantization method .{0,60} is not supported"
        r"|target_hidden feature dim mismatch"  # the drafter reads a layer that the server does not keep
        r"|architecture \S+ is not supported|no module or parameter named|has no \w*(vLLM|SGLang) implementation",
    ),
    _pattern(
        "missing_file",
        r"RepositoryNotFoundError|Repository Not Found|(Local)?EntryNotFoundError|RevisionNotFoundError"
        r"|is not a local folder and is not a valid model identifier|SafetensorError|HeaderTooLarge"
        r"|Cannot find any (model|of the) weights|Cannot find any of .{0,80}files|does not appear to have a file named"
        r"|OSError: (Can't load|Error no file named|We couldn't connect)|HFValidationError|No model weights found"
        r"|missing on disk|incomplete download|Invalid repository ID or local directory"
        r"|size mismatch for |not initialized from (the )?checkpoint|Unable to load weights|PytorchStreamReader failed"
        r"|404 Client Error|Incorrect path_or_model_id|OfflineModeIsEnabled|MetadataIncompleteBuffer"
        rf"|FileNotFoundError.*({MODEL_FILE})|{NO_SUCH}.*({MODEL_FILE})|({MODEL_FILE})\S*:? {NO_SUCH}",
    ),
    _pattern("config", r"heads \(?(?P<heads>\d+)\)? must be divisible by .{0,20}(tensor|tp)", _divisible),
    _pattern(
        "config",
        r"world.size \(?(?P<world>\d+)\)? (is|exceeds).{0,60}(available|visible) (GPUs?|devices?) \(?(?P<gpus>\d+)",
        _fewer_gpus,
    ),
    _pattern(
        "config",
        r"error: (unrecognized arguments|argument |the following arguments are required|ambiguous option)"
        r"|: No such (command|option)|validation errors? for \w+|invalid device ordinal"
        r"|only supported on GPUs with compute capability|greater than the derived \w+",
    ),
    _pattern(
        "garbage_output",
        r"NaN happened|Detected NaN|NaN in the (logits|output)|logits contains? (nan|inf)|nan values? (found|detected)"
        r"|probability tensor contains either `inf`, `nan`",
    ),
)

# ------------------------------------------------------------------------------------------------- consequences

CONSEQUENCES: tuple[Pattern, ...] = (
    _pattern(
        "no_progress",
        r"watchdog timeout|collective operation timeout|Engine iteration timed out|RPC call .{0,60}timed out"
        r"|did not respond within|health check (failed|timed out)",
    ),
    _pattern(
        "distributed_init",
        r"\bnccl(UnhandledCuda|System|Internal|Remote|Invalid\w*)(Error|Usage|Argument)?\b|NCCL error"
        r"|DistBackendError|DistNetworkError|Connection (closed|reset) by (remote )?peer|TCPStore"
        r"|\bgloo\b.*(timed? ?out|refused)|Timed out initializing process group|failed to connect to .{0,60}master",
    ),
    _pattern("missing_file", rf"^(?!.*(/psm_|/dev/shm|/mp-|\.so\b|\.sock|ipc:)).*(FileNotFoundError|{NO_SUCH})"),
    _pattern("missing_file", r"HTTPSConnectionPool\(host='huggingface\.co'|hf_hub_download .*(failed|error)"),
    _pattern("gated_model", r"\b40[13] Client Error\b"),
    _pattern("unsupported_model", r"KeyError: '(model\.)?layers\.\d+\.|did not match any variant of untagged enum"),
    _pattern("oom_start", r"CUBLAS_STATUS_NOT_INITIALIZED"),
    _pattern("wrong_model", r"The model `.{1,200}` does not exist"),
    _pattern(
        "config",
        r"\b(ValueError|AssertionError|NotImplementedError|ConfigError|ArgumentError): "
        r".*(must be|must divide|divisible|not supported|unsupported|incompatible|only supports?|requires?"
        r"|can(not| not|'t) be used|not allowed|should be|invalid|unknown)",
    ),
)

HINTS: tuple[Pattern, ...] = (
    _pattern("no_progress", r"No available shared memory broadcast block found"),
    _pattern("oom_start", r"exit ?code:? ?-9\b|died .{0,40}SIGKILL|signal 9 ?\(SIGKILL\)", _host_memory),
)

# --------------------------------------------------------------------------------------------- graph capture

EXCEPTION = re.compile(r"(?:^|[\s\]:|])(?P<name>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit))(?P<text>: .*)?$")
IN_CAPTURE = re.compile(
    r"\bin (capture\w*|_capture\w*|init_(cuda|device)_graphs?\w*|run_once|_warmup_and_capture)\b|torch/cuda/graphs\.py"
)
CAPTURE_BEGAN = re.compile(r"Capture \w*\s?(cuda |npu )?graph begin|Capturing (CUDA graph|batches)", re.IGNORECASE)
CAPTURE_ENDED = re.compile(r"Capture .{0,20}graph end|Graph capturing finished|Captured .{0,40}graph", re.IGNORECASE)
NONE = re.compile(r"(?P<none>'NoneType' object .*)")


def capturing(lines: Sequence[str], index: int) -> bool:
    """Whether line `index` was said while a graph was captured: by its traceback, or by a begin without an end."""
    above = lines[max(0, index - FRAMES) : index + 1]
    if any(IN_CAPTURE.search(line) for line in above if line.lstrip().startswith("File ") or ", in " in line):
        return True
    for line in reversed(lines[: index + 1]):
        if CAPTURE_ENDED.search(line):
            return False
        if CAPTURE_BEGAN.search(line):
            return True
    return False


def broken_capture(lines: Sequence[str], facts: Facts) -> Symptom | None:
    """Find an exception of no known cause that came out of a graph's capture."""
    for index in range(len(lines) - 1, -1, -1):
        found = EXCEPTION.search(lines[index].rstrip())
        if found is None or not capturing(lines, index):
            continue
        none = NONE.search(lines[index])
        return Symptom("graph_capture", lines[index], _none_in_capture(none, facts) if none else "")
    return None


def find(facts: Facts) -> Symptom | None:
    """Return what the log's end tells of: the last cause, else a broken capture, else a consequence, else a hint."""
    lines = _lines(facts)
    return (
        _last(lines, CAUSES, facts)
        or broken_capture(lines, facts)
        or _last(lines, CONSEQUENCES, facts)
        or _last(lines, HINTS, facts)
    )


def find_cause(facts: Facts) -> Symptom | None:
    """Return the last cause that the log's end names."""
    return _last(_lines(facts), CAUSES, facts)


def _lines(facts: Facts) -> list[str]:
    return [COLOUR.sub("", line[:LINE_WIDTH]) for line in facts.tail.splitlines()]


def _last(lines: Sequence[str], patterns: Sequence[Pattern], facts: Facts) -> Symptom | None:
    """Match lines from the last one; memory that runs out while a graph is captured is `oom_capture`."""
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if patterns is not HINTS and HANDLED.search(line):
            continue
        for pattern in patterns:
            if (match := pattern.regex.search(line)) is None:
                continue
            kind = pattern.kind if pattern.refine is None else pattern.refine(match)
            if kind == "oom_start" and patterns is CAUSES and capturing(lines, index):
                kind = "oom_capture"
            return Symptom(kind, line, pattern.advise(match, facts) if pattern.advise is not None else "")
    return None
