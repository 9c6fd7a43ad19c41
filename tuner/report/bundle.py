"""The dashboard's page as one file: its modules in one script, its styles and fonts inline, its data embedded.

The modules are written so that they can be put one after another: each imports by name from modules before it, and
no two have a top-level name in common.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?function|class|const)", re.MULTILINE)
FONT = re.compile(r'url\("/static/(vendor/[a-z-]+\.woff2)"\)')
STYLES = ("fonts.css", "base.css", "views.css")


def static(name: str) -> bytes:
    """Return one of the page's files."""
    return resources.files("tuner.dashboard").joinpath("static").joinpath(name).read_bytes()


def script() -> str:
    """Return every module as one, in the order of their imports."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in IMPORT.findall(static(name).decode()):
                visit(needed)
            order.append(name)

    visit("app.js")
    parts = [EXPORT.sub("", IMPORT.sub("", static(name).decode())) for name in order]
    return "\n".join(f"// {name}\n{part}" for name, part in zip(order, parts, strict=True))


def style() -> str:
    """Return every style, its fonts inline."""
    text = "\n".join(static(name).decode() for name in STYLES)
    return FONT.sub(lambda found: f'url("data:font/woff2;base64,{_base64(static(found[1]))}")', text)


def document(title: str, data: str) -> str:
    """Return the page with `data` (base64 of gzip of JSON) in it; `title` is escaped HTML.

    The policy allows exactly these scripts and styles, by digest, and no connection anywhere.
    """
    library, code, css = static("vendor/echarts.min.js").decode(), script(), style()
    policy = (
        f"default-src 'none'; script-src {_digest(library)} {_digest(code)}; style-src {_digest(css)}; "
        "font-src data:; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return PAGE % {"policy": policy, "title": title, "css": css, "library": library, "code": code, "data": data}


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="%(policy)s">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>%(title)s</title>
<style>%(css)s</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header id="bar"></header>
<main id="main" tabindex="-1"></main>
<div id="said" class="unseen" role="status" aria-live="polite"></div>
<noscript>This page draws itself with JavaScript, from the data in this file; it connects to nothing.</noscript>
<script type="application/octet-stream" id="embedded">%(data)s</script>
<script>%(library)s</script>
<script type="module">%(code)s</script>
</body>
</html>
"""


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _digest(text: str) -> str:
    return f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'"
