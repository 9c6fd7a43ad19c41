"""Which installed packages may be trained on, decided from their licence metadata alone.

Core metadata names a licence in three places: ``License-Expression`` (SPDX, PEP 639), ``Classifier:
License :: ...`` and the older free-text ``License``.  The first that says anything decides.  A package
passes only when everything it says is on the allow-list; what is unknown is refused.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions

PERMISSIVE_SPDX = frozenset(
    [
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "0BSD",
        "Apache-2.0",
        "PSF-2.0",
        "Python-2.0",
        "CNRI-Python",
        "ISC",
        "Zlib",
        "HPND",
        "Unlicense",
        "CC0-1.0",
        "BSL-1.0",
        "NCSA",
    ]
)
PERMISSIVE_CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
    "zlib/libpng License": "Zlib",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "The Unlicense (Unlicense)": "Unlicense",
    "University of Illinois/NCSA Open Source License": "NCSA",
}
PERMISSIVE_NAMES = {
    "mit": "MIT",
    "mit license": "MIT",
    "the mit license": "MIT",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "new bsd license": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd-2-clause": "BSD-2-Clause",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "psf": "PSF-2.0",
    "isc": "ISC",
    "isc license": "ISC",
    "unlicense": "Unlicense",
}


def permissive_expression(expression: str) -> bool:
    """Whether an SPDX expression can be satisfied by allow-listed licences alone.

    OR offers a choice and AND asks for both; AND binds tighter.  With parentheses or WITH, where that
    reading is not enough, every licence named must pass.  The LLVM exception only ever permits more.
    """
    expression = re.sub(r"\s+WITH\s+LLVM-exception\b", "", expression)
    if re.search(r"[()]|\bWITH\b", expression):
        alternatives = [re.sub(r"[()]|\b(?:OR|WITH)\b", " AND ", expression)]
    else:
        alternatives = re.split(r"\bOR\b", expression)
    for alternative in alternatives:
        terms = [term.strip() for term in re.split(r"\bAND\b", alternative) if term.strip()]
        if terms and all(term in PERMISSIVE_SPDX for term in terms):
            return True
    return False


def permissive_licence(expression: str | None, classifiers: list[str], licence_field: str | None) -> str | None:
    """The licence under which a package may be used here, or None when it is refused.

    ``classifiers`` are the full ``Classifier`` strings; those not about a licence are ignored.
    """
    if expression:
        return expression if permissive_expression(expression) else None
    named = [c.rsplit("::", 1)[-1].strip() for c in classifiers if c.startswith("License ::")]
    named = [name for name in named if name != "OSI Approved"]
    if named:
        known = [PERMISSIVE_CLASSIFIERS.get(name) for name in named]
        spdx = [name for name in known if name is not None]
        return " AND ".join(spdx) if len(spdx) == len(named) else None
    if licence_field:
        first_line = licence_field.strip().splitlines()[0].strip().rstrip(".").lower()
        if licence_field.strip() in PERMISSIVE_SPDX or permissive_expression(licence_field.strip()):
            return licence_field.strip()
        return PERMISSIVE_NAMES.get(first_line)
    return None


def canonical_name(name: str) -> str:
    """A distribution name in its one comparable spelling (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def permissive_distributions() -> list[tuple[str, str, Distribution]]:
    """Installed distributions that pass: (canonical name, the licence each passed under, it), sorted."""
    found: dict[str, tuple[str, str, Distribution]] = {}
    for distribution in distributions():
        fields = {
            field: distribution.metadata.get_all(field) or []
            for field in ("Name", "License-Expression", "Classifier", "License")
        }
        licence = permissive_licence(
            _first(fields["License-Expression"]), fields["Classifier"], _first(fields["License"])
        )
        name = _first(fields["Name"])
        if licence is not None and name:
            # the first on sys.path is the one that imports
            key = canonical_name(name)
            found.setdefault(key, (key, licence, distribution))
    return [found[name] for name in sorted(found)]


def _first(values: list[str]) -> str | None:
    return values[0] if values else None
