"""Tokenizers: text to token ids and back, with the few special ids that data sets need.

The built-in one takes bytes as tokens; a Hugging Face `tokenizer.json` is read through the library
`tokenizers` (optional: `pip install pipeweaver[tokenizers]`).

    ByteTokenizer().encode("hi")  ->  [104, 105]        bos 256, eos 257, image 258
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What data sets ask of a tokenizer.

    `image` stands for one feature row of an image. `encode` never returns it, whatever the text says,
    unless `special` is set: then names of special tokens in the text become their ids.
    """

    @property
    def vocabulary(self) -> int:
        """Number of ids, special ones included: the rows of an embedding."""
        ...

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int: ...

    @property
    def image(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that encode equally."""
        ...

    def encode(self, text: str, special: bool = False) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """One token per byte of UTF-8, and three special ids behind them."""

    bos = 256
    eos = 257
    image = 258
    vocabulary = 259
    fingerprint = "bytes"

    def encode(self, text: str, special: bool = False) -> list[int]:
        return list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, ids: list[int]) -> str:
        """Special ids are left out; bytes that are no UTF-8 show as U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`.

    Names of special tokens that are not given are taken from `tokenizer_config.json` beside the file.
    An image token that the file does not have is added behind its vocabulary. Raises ValueError if
    the library or the file is missing, or a special token is unknown.
    """

    def __init__(
        self, path: str | Path, *, image: str = "<image>", bos: str | None = None, eos: str | None = None
    ) -> None:
        self.path = Path(path)
        self._tokenizer = _read(self.path)
        names = _special_names(self.path)
        self._lock = threading.Lock()
        if self._tokenizer.token_to_id(image) is None:
            self._tokenizer.add_special_tokens([image])
        self.image = self._id(image)
        eos = eos or names.get("eos_token")
        if eos is None:
            raise ValueError(
                f"{self.path}: which token ends a sequence? Set eos, or put tokenizer_config.json with eos_token beside it"
            )
        self.eos = self._id(eos)
        bos = bos or names.get("bos_token")
        self.bos = self._id(bos) if bos is not None else None
        self.vocabulary = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        content = hashlib.sha256(self.path.read_bytes())
        content.update(repr((image, self.bos, self.eos)).encode())
        self.fingerprint = content.hexdigest()[:16]

    def encode(self, text: str, special: bool = False) -> list[int]:
        # Half a surrogate pair, which JSON can hold, is no text for the library.
        text = text.encode("utf-8", errors="replace").decode()
        with self._lock:
            # Text that happens to spell a special token stays text: a user's "<image>" is no image.
            self._tokenizer.encode_special_tokens = not special
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"{self.path}: there is no token {token!r} in this tokenizer")
        return int(found)


def _read(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"{path}: reading tokenizer files takes the library tokenizers; pip install pipeweaver[tokenizers]"
        ) from None
    if not path.is_file():
        raise ValueError(f"{path}: there is no such tokenizer file")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer file: {error}") from None


def _special_names(path: Path) -> dict[str, str]:
    """bos_token and eos_token of the configuration beside a tokenizer file, where there is one."""
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file():
        return {}
    try:
        config = json.loads(beside.read_text())
    except ValueError as error:
        raise ValueError(f"{beside}: not JSON: {error}") from None
    names: dict[str, str] = {}
    for key in ("bos_token", "eos_token"):
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[key] = value
    return names
