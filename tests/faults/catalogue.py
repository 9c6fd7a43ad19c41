"""All faults by name, and by the part of the engine that they are in."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from tests.faults import answer, cache, drafter, model, sampling, scheduler, verify
from tests.faults.fault import Fault


def _faults(module: ModuleType) -> Iterator[Fault]:
    return (value for value in vars(module).values() if isinstance(value, Fault))


GROUPS: dict[str, tuple[Fault, ...]] = {
    module.__name__.rpartition(".")[2]: tuple(_faults(module))
    for module in (model, cache, drafter, verify, sampling, scheduler, answer)
}
FAULTS: dict[str, Fault] = {fault.name: fault for group in GROUPS.values() for fault in group}


def table() -> str:
    """Return one paragraph a fault: name, what is wrong, where and how it shows, what it needs."""
    lines = []
    for group, faults in GROUPS.items():
        lines.append(f"{group}")
        for fault in faults:
            needs = "; ".join(fault.needs) or "nothing more: greedy text of a short prompt"
            lines += [
                f"  {fault.name}: {fault.wrong}",
                f"      shows under {', '.join(fault.settings)}: {fault.shows}",
                f"      needs {needs}",
            ]
    return "\n".join(lines)
