"""Text and tokens: tokenizer, chat template, incremental detokenising, stop strings.

Everything here is owned by the HTTP front; the engine process knows token ids only. No torch, no transformers.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from engine.chat import ChatTemplate
from engine.errors import ModelError
from engine.request import GREEDY, Sampling

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so a fourth unfinished token in a row is not one character.
LONGEST_CHARACTER = 4
# A normaliser may join characters before they are tokenised (NFC: three to one); past this it is not text.
NORMALISER_SHRINKS = 4


class Detokenizer(Protocol):
    """Turns tokens into text as they come; the pieces concatenate to the decoded whole."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that `tokens` complete."""

    def flush(self) -> str:
        """Return what is left when no token follows: an unfinished character becomes U+FFFD."""


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's character of each byte, inverted: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTES = _byte_alphabet()


class TokenBytes(dict[int, bytes]):
    """The bytes that each token of a byte-level tokenizer adds to the text, filled as tokens are met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = {key for key, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def __missing__(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None or self.silent(token):
            data = b""
        elif all(character in _BYTES for character in name):
            data = bytes(_BYTES[character] for character in name)
        else:  # an added token is plain text
            data = name.encode()
        self[token] = data
        return data

    def silent(self, token: int) -> bool:
        """Whether a token never has text: a special one, or a padded row of the embedding."""
        return token in self._special or self._tokenizer.id_to_token(token) is None


class ByteDetokenizer:
    """For byte-level tokenizers: a table look-up a token and an incremental UTF-8 decoder."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that `tokens` complete."""
        table = self._table
        return self._decode(b"".join([table[token] for token in tokens]))

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character, else nothing."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other tokenizer: decode a window of the last tokens and emit by how much it grew.

    The window keeps the tokens whose text came last, since a token's text may depend on its left neighbour. Byte
    sequences that are not UTF-8 can come out with another number of U+FFFD than from decoding the whole: such a
    decoder judges a run of bytes only at its end.
    """

    def __init__(self, decode: Callable[[list[int]], str], silent: Callable[[int], bool]) -> None:
        self._decode = decode
        self._silent = silent
        self._shown: list[int] = []  # tokens whose text has been emitted, the last piece only
        self._held: list[int] = []  # tokens without text yet
        self._unfinished = 0  # how many of them, at the end, are parts of a character
        self._text = ""  # text of `_shown`

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that `tokens` complete."""
        return "".join([self._step(token) for token in tokens if not self._silent(token)])

    def _step(self, token: int) -> str:
        self._held.append(token)
        text = self._decode(self._shown + self._held)
        self._unfinished = self._unfinished + 1 if text.endswith(REPLACEMENT) else 0
        if 0 < self._unfinished < LONGEST_CHARACTER:
            return ""
        self._unfinished = 0
        return self._show(text)

    def _show(self, text: str) -> str:
        piece = text[len(self._text) :]
        if piece:
            # The next token's text is judged beside these tokens, whose own text is measured without a left part.
            self._shown, self._text = self._held, self._decode(self._held)
            self._held = []
        return piece

    def flush(self) -> str:
        """Return what an unfinished character decodes to, if there is one."""
        return self._show(self._decode(self._shown + self._held)) if self._held else ""


def _failure(stop: str) -> list[int]:
    """Return Knuth-Morris-Pratt's table: the longest proper prefix that ends at each position."""
    table = [0] * len(stop)
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[index] != stop[matched]:
            matched = table[matched - 1]
        matched += stop[index] == stop[matched]
        table[index] = matched
    return table


class StopMatcher:
    """Cuts text before the first stop string, and shows nothing that may become one.

    Linear in the text whatever the stop strings are: each has a Knuth-Morris-Pratt automaton whose state is the
    length of its prefix that the text so far ends with; the longest of these is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return (text to show, whether a stop string was completed); after a stop nothing may follow."""
        buffer = self._held + text
        cuts = [cut for index in range(len(self._stops)) if (cut := self._advance(index, text)) is not None]
        if cuts:
            self._held = ""
            return buffer[: len(buffer) - len(text) + min(cuts)], True
        keep = max(self._states, default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def _advance(self, index: int, text: str) -> int | None:
        """Run one automaton over `text`; return where its stop starts, relative to `text`, when it is completed."""
        stop, table = self._stops[index]
        state = self._states[index]
        for position, character in enumerate(text):
            while state and stop[state] != character:
                state = table[state - 1]
            state += stop[state] == character
            if state == len(stop):
                return position + 1 - len(stop)
        self._states[index] = state
        return None

    def flush(self) -> str:
        """Return what was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class Piece:
    """What one round added to an answer. `tokens` ends with the token that completed a stop string."""

    text: str
    tokens: tuple[int, ...]
    finish: str | None


class Decoder:
    """Tokens of one request to printable text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None

    def feed(self, tokens: tuple[int, ...], finish: str | None) -> Piece:
        """Return the printable text of a round.

        Args:
            tokens: the round's tokens; when `finish` is "stop" the last one is an eos token, which has no text.
            finish: the engine's reason to end, or None.
        """
        shown = tokens[:-1] if finish == "stop" else tokens
        if self._matcher is None:
            text = self._detokenizer.feed(shown)
            return Piece(text + self._detokenizer.flush() if finish else text, tokens, finish)
        parts: list[str] = []
        for count, token in enumerate(shown, 1):
            # Token by token: the count of tokens up to the stop string is exact within a round of several.
            text, stopped = self._matcher.feed(self._detokenizer.feed((token,)))
            parts.append(text)
            if stopped:
                return Piece("".join(parts), tokens[:count], "stop")
        if finish:
            text, stopped = self._matcher.feed(self._detokenizer.flush())
            parts += [text, self._matcher.flush()]
            finish = "stop" if stopped else finish
        return Piece("".join(parts), tokens, finish)


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; an absent file is an empty one.

    Raises:
        ModelError: the file cannot be read or holds something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}; get the file again") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: expected a JSON object; get the file again")
    return document


def _eos(*documents: dict[str, Any]) -> tuple[int, ...]:
    """Return the eos ids of the first document that names any (generation_config.json before config.json)."""
    for document in documents:
        value = document.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = tuple(token for token in ids if isinstance(token, int) and not isinstance(token, bool))
        if found:
            return found
    return ()


def _sampling(generation: dict[str, Any], path: Path) -> Sampling:
    """Return the default way to draw; a file without `do_sample: true` means greedy.

    Raises:
        ModelError: a value that is no number in its range.
    """
    if generation.get("do_sample") is not True:
        return GREEDY
    found = [generation.get(name) for name in ("temperature", "top_k", "top_p")]
    numbers = [1.0 if value is None else value for value in found]
    temperature, top_p = numbers[0], numbers[2]
    top_k = 0 if found[1] is None else found[1]
    fine = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (temperature, top_k, top_p))
    if not fine or temperature < 0 or not 0 < top_p <= 1 or int(top_k) != top_k:
        raise ModelError(f"{path}: temperature, top_k and top_p must be numbers in their ranges; correct the file")
    return Sampling(float(temperature), max(0, int(top_k)), float(top_p))


class Text:
    """Everything textual about a target: made once, shared by all requests.

    Attributes:
        eos: token ids that end a text.
        sampling: how a request without a temperature draws, by the target's generation_config.json.
        vocab_size: token ids are below this.
        chat: the chat template, or None when the target has none.
    """

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json, config.json, generation_config.json and the chat template of `folder`.

        Raises:
            ModelError: a file is missing or unusable.
        """
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder; give the folder that holds the target's config.json")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: missing; the target's folder needs its fast tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for every bad file
            raise ModelError(f"{path}: not a tokenizer: {error}; get the file again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        options = _read_json(folder / "tokenizer_config.json")
        inner = config.get("text_config")
        shapes = [config, inner] if isinstance(inner, dict) else [config]
        self.eos = _eos(generation, *shapes)
        self.sampling = _sampling(generation, folder / "generation_config.json")
        sizes = [size for shape in shapes if isinstance(size := shape.get("vocab_size"), int)]
        self.vocab_size = sizes[0] if sizes else self._tokenizer.get_vocab_size()
        self.chat = ChatTemplate.read(folder, options)
        self._bytes = TokenBytes(self._tokenizer)
        self._byte_level = isinstance(self._tokenizer.decoder, ByteLevel)
        # Where any text can be unknown, one token may stand for any length of it.
        covers_all = self._byte_level or getattr(self._tokenizer.model, "byte_fallback", False)
        self._longest = max(map(len, self._tokenizer.get_vocab())) if covers_all else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Releases the interpreter lock while it works, so long texts belong into a thread."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `tokens`, without special tokens unless asked for."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def token(self, token: int) -> str:
        """Return one token's text by itself; special tokens by their names, half characters as U+FFFD."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def cannot_fit(self, text: str, tokens: int) -> bool:
        """Whether `text` has more than `tokens` tokens by its length alone, so that nobody need tokenise it."""
        return self._longest is not None and len(text) > NORMALISER_SHRINKS * self._longest * (tokens + 1)

    def decoder(self, stops: Sequence[str]) -> Decoder:
        """Return a fresh decoder for one request."""
        table = self._bytes
        if self._byte_level:
            return Decoder(ByteDetokenizer(table), stops)
        return Decoder(WindowDetokenizer(self._tokenizer.decode, table.silent), stops)


def load_text(folder: Path) -> Text:
    """Return the tokenizer, template and generation defaults of a target's folder.

    Raises:
        ModelError: a file is missing or unusable.
    """
    return Text(folder)
