"""HTML as nested calls: every text and attribute is escaped unless it is HTML already."""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = {"meta", "br", "line", "circle", "path", "rect"}


class Html(str):
    """Text that is HTML and stays as it is."""

    __slots__ = ()


Child = str | Html | Iterable["Child"] | None


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Html:
    """Return an element. Underscores of attribute names become hyphens; a trailing one is dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_text(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not children:
        return Html(f"<{name}{written}>" if name in ("meta", "br") else f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Return children one after another, escaped where they are plain text."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(child, quote=False))
        else:
            parts.append(join(child))
    return Html("".join(parts))


def _text(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
