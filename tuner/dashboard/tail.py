"""Reading what somebody else is appending to: only what is new, only whole lines, never a lock."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tuner.store import MAX_LINE

CHUNK = 2**20


def open_plain(path: Path) -> IO[bytes]:
    """Open a plain file for reading: what is a link or a pipe in a stranger's study is not followed or waited for.

    Raises:
        OSError: no such file, or it is not plain.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return os.fdopen(fd, "rb")


@dataclass(frozen=True)
class Lines:
    """New whole lines. `restarted`: the file was replaced, cut or removed, so these are its first ones."""

    lines: tuple[bytes, ...]
    restarted: bool = False


class Tail:
    """Follows one file of lines; a line longer than `longest` bytes is passed over and counted."""

    def __init__(self, path: Path, longest: int = MAX_LINE) -> None:
        self.path = path
        self.too_long = 0
        self._longest = longest
        self._start(None)

    def _start(self, inode: int | None) -> None:
        self._inode = inode
        self._offset = 0
        self._rest = b""
        self._skipping = False

    def read(self) -> Lines:
        """Return the lines that were completed since the last call; a file that is not there has none.

        Raises:
            OSError: it is there and cannot be read.
        """
        try:
            file = open_plain(self.path)
        except FileNotFoundError:
            known = self._inode is not None
            self._start(None)
            return Lines((), restarted=known)
        with file:
            status = os.fstat(file.fileno())
            restarted = self._inode is not None and (self._inode != status.st_ino or status.st_size < self._offset)
            if restarted or self._inode is None:
                self._start(status.st_ino)
            file.seek(self._offset)
            found: list[bytes] = []
            while data := file.read(CHUNK):
                self._offset += len(data)
                found += self._cut(data)
        return Lines(tuple(found), restarted)

    def _cut(self, data: bytes) -> list[bytes]:
        *whole, rest = (self._rest + data).split(b"\n")
        if self._skipping and whole:
            whole = whole[1:]
            self._skipping = False
        self._rest = b"" if self._skipping else rest
        if len(self._rest) > self._longest:
            self.too_long += 1
            self._rest, self._skipping = b"", True
        kept = [line for line in whole if len(line) <= self._longest]
        self.too_long += len(whole) - len(kept)
        return [line for line in kept if line.strip()]


def read_piece(path: Path, offset: int | None, most: int) -> tuple[bytes, int, int]:
    """Return bytes of a file from `offset` (None: its last `most`), where they begin, and the file's size.

    Raises:
        OSError: it cannot be read.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - most) if offset is None or offset > size else offset
        file.seek(start)
        return file.read(most), start, size
