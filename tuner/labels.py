"""Short names for people: of configurations, values and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted path: value} of a configuration's leaves; lists are leaves."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def label(config: Mapping[str, Any], searched: Iterable[str]) -> str:
    """Return what sets a configuration apart: its draft, then the other searched paths.

    `dflash block_size=8 layers=2`, `none graphs=captured`, `policy 1–4: dflash(8), 5+: none`.
    """
    flat = flatten(config)
    words = [draft_kind(config)]
    for path in searched:
        if path in ("draft.kind", "draft"):
            continue
        if path == "draft.by_running" and path in flat:
            words.append(_ranges(flat[path]))
        elif path in flat:
            words.append(f"{path.rsplit('.', 1)[-1]}={plain(flat[path])}")
        elif f"{path}.kind" in flat:
            words.append(f"{path}={_group(flat, path)}")
    if "draft" in searched:
        words += [f"{p.removeprefix('draft.')}={plain(v)}" for p, v in flat.items() if _own(p, v)]
    return " ".join(words)


def draft_kind(config: Mapping[str, Any]) -> str:
    """Return the kind of a recorded configuration's draft."""
    draft = config.get("draft")
    return str(draft.get("kind", "none")) if isinstance(draft, Mapping) else "none"


def varying(searched: Iterable[str], configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the searched paths that differ between configurations: what labels need to tell them apart."""
    known = [flatten(config) for config in configs]
    kept = []
    for path in searched:
        seen = {str({p: v for p, v in flat.items() if p == path or p.startswith(f"{path}.")}) for flat in known}
        if len(seen) > 1:
            kept.append(path)
    return kept


def _own(path: str, value: Any) -> bool:
    return path.startswith("draft.") and path != "draft.kind" and value is not None


def _group(flat: Mapping[str, Any], path: str) -> str:
    inner = [plain(v) for p, v in flat.items() if p.startswith(f"{path}.") and p != f"{path}.kind" and v is not None]
    kind = str(flat[f"{path}.kind"])
    return f"{kind}({', '.join(inner)})" if inner else kind


def _ranges(by_running: Any) -> str:
    """Return a policy's table: which draft for how many running requests."""
    parts = []
    for first, last, draft in by_running:
        own = [plain(v) for k, v in draft.items() if k not in ("kind", "model") and v is not None and v != "greedy"]
        running = f"{first}+" if last is None else f"{first}–{last}"
        parts.append(f"{running}: {draft['kind']}" + (f"({', '.join(own)})" if own else ""))
    return ", ".join(parts)


def plain(value: Any) -> str:
    """Return a value without quotes and brackets where they say nothing."""
    if isinstance(value, list | tuple):
        return "/".join(plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def clean(text: str) -> str:
    """Return a text of unknown origin without what would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def number(value: float | None) -> str:
    """Return three to four significant digits, without an exponent; a dash where nothing was measured."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}".replace(",", " ")
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or size == 0 else f"{value:.3f}"


def with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    """Return `7.12 [6.9–7.4]`."""
    if value is None or interval is None:
        return number(value)
    return f"{number(value)} [{number(interval[0])}–{number(interval[1])}]"
