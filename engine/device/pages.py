"""Who holds which KV page and which row of the device tables: plain numbers, kept on the host."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import OutOfMemory


@dataclass(frozen=True)
class Place:
    """A row of the device tables, and the pages of its request, in the order of its tokens."""

    row: int
    pages: tuple[int, ...]


class Pages:
    """Pages and rows, handed to requests by id.

    What is released can be handed out at once: the device works in the order it is told, so the next owner's first
    write comes after the last round that was launched for the previous one.
    """

    def __init__(self, pages: int, rows: int, page_size: int) -> None:
        self.page_size, self.pages = page_size, pages
        self._free = list(range(pages - 1, -1, -1))
        self._rows = list(range(rows - 1, -1, -1))
        self._places: dict[int, Place] = {}

    @property
    def free(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    def place(self, request: int) -> Place:
        """Return what a request holds."""
        return self._places[request]

    def admit(self, request: int, tokens: int) -> Place:
        """Give a request a row, and the pages for `tokens`.

        Raises:
            OutOfMemory: fewer are free.
        """
        needed = -(-tokens // self.page_size)
        if needed > len(self._free) or not self._rows:
            raise OutOfMemory(f"request {request} needs {needed} KV pages, {len(self._free)} are free")
        place = Place(self._rows.pop(), tuple(self._free.pop() for _ in range(needed)))
        self._places[request] = place
        return place

    def release(self, request: int) -> None:
        """Take a request's row and pages back."""
        place = self._places.pop(request)
        self._rows.append(place.row)
        self._free.extend(reversed(place.pages))
