"""One study over every GPU of this host: this engine's candidates beside SGLang's, and what the host was used for.

Parts, each a command that may be stopped and called again; `record` joins what they left in `--folder`:

    search     `tuner search` on the committed space, trials side by side; `--wall` shortens its budget
    record     the study, its front, policy and confirmation; and of the host: who held which GPU when, whether trials
               disturb each other, makespan against the least possible and against one after the other, GPU memory
               before and after each trial, processes left
    pretended  the same space on eight GPUs that do not exist: leases, placement and windows are real

SGLang's command stands in the machine's backends file; the 8B shape is synthetic (random weights, forced acceptance).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import RESULTS, ROOT, write
from benchmarks.packed_search import measure
from benchmarks.sglang_cpu import launch_text, without_paths
from benchmarks.sglang_gpu import lines, memory_of, search, spans, study_folder, summary, tail
from engine.backends import commands_file, find_command
from tuner.machine import look_at_gpus
from tuner.store import StudyFolder

SPACE = ROOT / "search_spaces" / "qwen3_8b_8gpu.yaml"
FOLDER = ROOT / ".build" / "host"
BACK_MIB = 64  # memory that a GPU may hold more after a trial than before the first: a driver's own


def shortened(space: Path, folder: Path, wall: str | None) -> Path:
    """Write the space with another wall time, if one is given, and return where it is."""
    if wall is None:
        return space
    document: dict[str, Any] = yaml.safe_load(space.read_text(encoding="utf-8"))
    document["study"]["budget"]["wall"] = wall
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / space.name
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------- the host


def leases(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return who held which GPUs when, from a study's events: `gpus` as the lease named them, Unix times."""
    held: dict[int, dict[str, Any]] = {}
    for event in events:
        trial = event["trial"]
        if event["kind"] == "progress" and event["stage"] == "lease" and event["text"].startswith("GPU "):
            gpus = event["text"].removeprefix("GPU ").split(", ")
            held[trial] = {"trial": trial, "gpus": gpus, "begin": event["time"], "end": event["time"]}
        elif trial in held:
            held[trial]["end"] = event["time"]  # the record comes when the lease is over
    return [held[trial] for trial in sorted(held)]


def clashes(held: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return pairs of trials that held a GPU at the same time."""
    return [
        (one["trial"], other["trial"])
        for one, other in combinations(held, 2)
        if set(one["gpus"]) & set(other["gpus"]) and one["begin"] < other["end"] and other["begin"] < one["end"]
    ]


def used(records: Sequence[dict[str, Any]], packing: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how well batches of trials were packed; seconds. `one_by_one`: all but the waiting of their trials."""
    batches = []
    for batch in packing:
        numbers = range(batch["first"], batch["first"] + batch["trials"])
        spent = [each["seconds"] for each in records if each["trial"] in numbers]
        alone = sum(sum(seconds.values()) - seconds.get("lease", 0.0) for seconds in spent)
        batches.append(batch | {"one_by_one": round(alone, 1)})
    makespan, bound, alone = (sum(each[key] for each in batches) for key in ("makespan", "bound", "one_by_one"))
    found: dict[str, Any] = {"batches": batches}
    if makespan and bound:
        found |= {"makespan": round(makespan, 1), "bound": round(bound, 1), "one_by_one": round(alone, 1)}
        found |= {"over_bound": round(makespan / bound, 3), "times_faster": round(alone / makespan, 2)}
    return found


def back(
    held: Sequence[dict[str, Any]], of: dict[int, dict[str, Any]], samples: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return MiB by GPU before the study and at its end, and of each trial on its own GPUs.

    `of`: by trial, what `memory_of` says of all GPUs. `back` is None where no sample was taken after the last trial.
    """
    own = {
        str(each["trial"]): {gpu: of[each["trial"]].get(gpu) for gpu in (name.split()[0] for name in each["gpus"])}
        for each in held
        if each["trial"] in of
    }
    if not samples:
        return {"back": None, "by_trial": own}
    first, last = samples[0], samples[-1]
    told = bool(first["used"]) and last["time"] >= max((each["end"] for each in held), default=0.0)
    most = {gpu: last["used"].get(gpu, mib) - mib for gpu, mib in first["used"].items()}
    return {
        "before_mib": first["used"],
        "after_mib": last["used"],
        "back": all(more <= BACK_MIB for more in most.values()) if told else None,
        "by_trial": own,
        "processes_left": last["pids"],
    }


def record(folder: Path, space: Path, out: Path, commit: str | None) -> None:
    """Join what the search left and write it, without this machine's paths."""
    folder_of = study_folder(folder, space)
    study = StudyFolder(folder_of)
    records, events = lines(folder_of / "trials.jsonl"), lines(folder_of / "events.jsonl")
    samples, held = lines(folder / "memory.jsonl"), leases(events)
    state = json.loads(study.search.read_text(encoding="utf-8")) if study.search.is_file() else {}
    memory = {span.trial: memory_of(span, samples) for span in spans(folder_of)}
    version, command = find_command("sglang", None)
    whole = [path for path in (folder_of / name for name in ("front.json", "policy.json")) if path.is_file()]
    found: dict[str, Any] = {
        "commit": commit,
        "synthetic": all(each["synthetic"] for each in records if each["state"] != "infeasible"),
        "peer": f"sglang {version}",
        "options": [word for word in command.command if word.startswith("--")],
        "gpus": [f"{gpu.index} {gpu.name} ({gpu.uuid})" for gpu in look_at_gpus().gpus],
        "calls": lines(folder / "calls.jsonl"),
        "space": yaml.safe_load(study.space.read_text(encoding="utf-8")),
        "study": json.loads(study.provenance.read_text(encoding="utf-8")),
        "search": state,
        "leases": held,
        "clashes": clashes(held),
        "packing": used(records, state.get("packing", [])),
        "memory": back(held, memory, samples),
        "summary": [described(each) for each in records],
        "launch": launch_text(folder_of / "launch.yaml"),
        "logs": {str(each["trial"]): tail(folder_of, each["trial"]) for each in records if each["failure"] is not None},
        "trials": records,
    }
    found |= {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in whole}
    write(out, found)
    written = json.loads(out.read_text(encoding="utf-8"))
    names = (str(folder), str(out.parent), str(commands_file().parent), str(ROOT), str(Path.home()), sys.prefix)
    out.write_text(json.dumps(without_paths(written, names), indent=1) + "\n", encoding="utf-8")
    for line in found["summary"]:
        print(json.dumps(line))
    print(json.dumps({key: found[key] for key in ("clashes", "packing")} | {"search": state}, indent=1))


def described(record: dict[str, Any]) -> dict[str, Any]:
    """Return a trial on one line."""
    config = record["config"]
    return summary(record, None, []) | {
        "backend": config["backend"]["kind"],
        "layers": config["draft"].get("layers"),
        "gpus": record["gpus"],
        "of": record["of"],
    }


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("search", "record", "pretended"))
    parser.add_argument("--space", type=Path, default=SPACE)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="what the parts keep between calls")
    parser.add_argument("--seconds", type=float, default=3600.0, help="search: stop between two trials before")
    parser.add_argument("--wall", help="search: wall time instead of the space's, such as 6m")
    parser.add_argument("--out", type=Path, default=None, help="the file to write")
    parser.add_argument("--commit", help="record: the commit, where this copy has no git")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    folder = arguments.folder.absolute()
    space = shortened(arguments.space, folder, arguments.wall)
    if arguments.part == "search":
        raise SystemExit(search(folder, space, arguments.seconds))
    if arguments.part == "record":
        record(folder, space, arguments.out or RESULTS / "host_search.json", arguments.commit)
    else:
        write(arguments.out or RESULTS / "host_pretended.json", {"space": space.name} | measure(text=space.read_text()))


if __name__ == "__main__":
    main()
