"""Text to tokens and tokens to text: the wrapper over tokenizer.json, the incremental detokenizer and stop strings.

Tokens of a byte-level vocabulary are pieces of UTF-8, cut anywhere. The detokenizer maps each id to its bytes and
decodes the bytes incrementally, so the joined pieces always equal the decoding of all bytes at once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

TOKENIZER_FILE = "tokenizer.json"
LONG_TEXT_CHARS = 10_000


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are U+0100 and up.
    Source: the GPT-2 byte-level BPE.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


class Tokenizer:
    """The vocabulary of one model folder. Immutable after construction, shared by all requests."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        alphabet = _byte_alphabet()
        self.token_bytes: list[bytes] = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
        for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id in added or any(c not in alphabet for c in token):
                data = token.encode()
            else:
                data = bytes(alphabet[c] for c in token)
            if token_id >= len(self.token_bytes):
                self.token_bytes += [b""] * (token_id + 1 - len(self.token_bytes))
            self.token_bytes[token_id] = data
        self.longest_token = max(len(b) for b in self.token_bytes)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Return the folder's tokenizer, or None if it has no tokenizer.json. Raises ValueError if that is broken."""
        path = folder / TOKENIZER_FILE
        if not path.exists():
            return None
        if not path.is_file():
            raise ValueError(f"{path}: is not a regular file; fetch it again, or remove it to serve token ids alone")
        try:
            return cls(_Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for a file it can't read
            raise ValueError(
                f"{path}: not a tokenizer that `tokenizers` can load: {error}; fetch it again, or remove it to serve "
                "token ids alone"
            ) from error

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; markers in it become their ids, and nothing is added around it.

        Gives up Python's lock while it works on a long text, so those may be encoded in a thread.
        """
        if len(text) < LONG_TEXT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        else:  # the library gives the lock up for batches only
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def token_id(self, token: str) -> int | None:
        """Return the id of one whole token such as the end-of-sentence marker, or None."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id


class Detokenizer:
    """Turns one answer's tokens into text as they come. Special tokens have no text unless asked for."""

    __slots__ = ("_decoder", "_skipped", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text completed by `token_ids`; bytes of an unfinished character wait for the next call.

        Bytes that can't be UTF-8 become U+FFFD. Ids beyond the vocabulary (padding rows) have no text.
        """
        table, skipped = self._token_bytes, self._skipped
        data = b"".join([table[i] for i in token_ids if 0 <= i < len(table) and i not in skipped])
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what is left: U+FFFD if the answer was cut inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopHolder:
    """Lets text through up to the first stop string, and holds back only what may still become one.

    The answer ends where a stop string is first complete, reading character by character; of several that complete
    there, the longest is cut. So the result does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_begins", "_held", "_keep", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        # Most pieces have no character that any stop string begins with, and are through at once.
        self._begins = re.compile("|".join({re.escape(stop[0]) for stop in self._stops}) or r"(?!)").search
        self._keep = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is now certain. After a match (`matched` is set) nothing more comes."""
        if self.matched is not None:
            return ""
        if not self._held and self._begins(text) is None:
            return text
        # A match can't begin before the held text: it is the longest suffix that begins a stop string.
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self._held = ""
            self.matched = best[2]
            return text[: best[0] if self._keep else best[1]]
        held = self._num_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the held text: the answer ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            for stop in self._stops:
                if stop.startswith(tail) and len(stop) > length:
                    return length
        return 0
