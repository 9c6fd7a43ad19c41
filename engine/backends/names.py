"""What foreign servers share: model names (a local folder as an absolute path, anything else as a hub's name), and
refusals that are true of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.backends.shallow import first_layers
from engine.config import BUNDLED, EngineConfig, draft_folder, target_folder
from engine.estimate import DraftShape, Machine, Refusal, draft_paths
from engine.shape import ModelShape

DTYPES = ("auto", "bfloat16", "float32")
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")


def target_path(config: EngineConfig) -> str:
    """Return the target's folder, or its name on the hub."""
    folder = target_folder(config)
    return str(folder.absolute()) if folder.is_dir() else config.model.target


def draft_path(config: EngineConfig) -> str:
    """Return the folder or name of the drafter; with `layers`, the folder of one that has only those.

    Several drafts of a policy share one drafter; without speculation there is none, and the answer is empty.

    Raises:
        ModelError: the drafter with fewer layers cannot be made.
    """
    draft = next((draft for _, draft in draft_paths(config)), None)
    if draft is None:
        return ""
    folder = draft_folder(config, draft)
    if not folder.is_dir():
        return draft.model if draft.model is not None else str(folder.absolute())
    if draft.layers is not None:
        folder = first_layers(folder, draft.layers, dummy=config.model.load == "dummy")
    return str(folder.absolute())


def hub_drafts(config: EngineConfig, server: str) -> Iterator[Refusal]:
    """Yield what needs a drafter's files where only a name is known."""
    for path, draft in draft_paths(config):
        if draft.model is None and config.model.target != BUNDLED and not target_folder(config).is_dir():
            yield Refusal(
                f"{path}.model", f"{config.model.target} is no folder here, so its drafter is unknown; name it"
            )
        elif draft.layers is not None and not draft_folder(config, draft).is_dir():
            name = draft.model or str(Path(draft_folder(config, draft)))
            yield Refusal(
                f"{path}.layers",
                f"{server} has no such option, and the first layers of {name!r} can be split off only from a folder; "
                f"run `hf download {name} --local-dir DIR` and give DIR, or set it to null",
            )


def last_layer_tapped(shape: ModelShape, draft: DraftShape | None, server: str) -> Iterator[Refusal]:
    """Yield that a drafter reads what the server never sees: these servers keep the residual stream *before* layers
    only, so what leaves the last one is not among it, and the first request ends the server."""
    if draft is not None and max(draft.taps) == shape.layers - 1:
        yield Refusal(
            "draft.model",
            f"the drafter reads the target's last layer ({shape.layers - 1} of {shape.layers}), which {server} does "
            "not hand to drafters; use the native engine, or a drafter trained on earlier layers",
        )


def too_many_gpus(config: EngineConfig, machine: Machine) -> Iterator[Refusal]:
    """Yield that a server spans more GPUs than there are: known without the model."""
    needed = config.parallel.gpus
    if machine.kind == "cuda" and needed > machine.devices:
        yield Refusal("parallel", f"needs {needed} GPUs, this machine has {machine.devices}; lower a degree")
    elif machine.kind == "cpu" and needed > 1:
        yield Refusal("parallel", f"needs {needed} GPUs and none is visible; set every degree to 1")


def precision(config: EngineConfig, server: str) -> Iterator[Refusal]:
    """Yield precisions that none of these servers has."""
    model = config.model
    if model.dtype not in DTYPES:
        yield Refusal("model.dtype", f"{server} cannot compute in {model.dtype}; use {one_of(DTYPES)}")
    if model.kv_dtype not in (*KV_DTYPES, model.dtype):
        yield Refusal("model.kv_dtype", f"{server} has no KV cache in {model.kv_dtype}; use {one_of(KV_DTYPES)}")


def unknown_word(path: str, word: str, unset: str, known: tuple[str, ...], server: str) -> Iterator[Refusal]:
    """Yield that a server's option does not take a word; `unset` leaves the choice to the server."""
    if word not in (unset, *known):
        yield Refusal(path, f"{server} has no {word!r}; use {unset} or one of {', '.join(known)}")


def one_of(values: tuple[object, ...]) -> str:
    """Return values as words: `16, 32 or 64`."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
