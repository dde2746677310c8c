"""Text to token ids and back: the model's own tokenizer, its chat template, and text that grows as tokens are drawn.

Nothing here is downloaded and no code of the model's folder is run. This module knows no engine and no server.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tonnage.errors import BadModel, MissingPart, RequestError

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
# What a decoder writes where bytes are no character; at the end of a text it may be a character's first half.
_REPLACEMENT = "\ufffd"
# A stream decodes the last tokens again with each new one: a space, or a character, may depend on those before.
_CONTEXT, _WINDOW, _LONGEST_WINDOW = 6, 24, 256
# A character has at most four bytes, so tokens beyond that are no character in the making.
_MOST_HALVES = 4


class Tokenizer:
    """A tokenizer of transformers, by the four things that serving needs of it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The library behind it decodes in a tenth of the time of the wrapper.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # Set once and for all, so that threads may encode side by side.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer | None":
        """The tokenizer in a model's folder; None where the folder has none."""
        if not any((Path(folder) / name).is_file() for name in _FILES):
            return None
        try:
            return cls(_read(str(folder)))
        except ImportError:
            raise MissingPart("A tokenizer needs transformers.", hint="pip install 'tonnage[serve]'") from None
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise BadModel(
                f"The tokenizer in {folder} cannot be read: {reason}",
                hint="Put the model's own tokenizer.json there, or serve token ids from a folder without tokenizer.",
            ) from None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with what the tokenizer puts before every text."""
        return self._encode(text, special=True)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        else:
            ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; `special` shows end-of-sequence and its like."""
        if self._backend is not None:
            text: str = self._backend.decode(ids, skip_special_tokens=not special)
        else:
            text = self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation up to where the assistant's next words begin."""
        if not self._tokenizer.chat_template:
            hint = "Use /v1/completions, or a model with a chat template."
            raise RequestError("This model's tokenizer has no chat template.", hint=hint)
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # the template's own complaint: roles that must alternate, no system message
            reason = str(error).strip().partition("\n")[0]
            raise RequestError(
                f"The model's chat template refuses these messages: {reason}",
                hint="Change the messages or their order.",
            ) from None
        return self._encode(text, special=False)

    def token_text(self, token_id: int) -> str:
        """One token as it reads inside a text: its leading space is kept, special tokens are shown."""
        if token_id not in self._texts:
            anchor = self._anchor
            text = self.decode([*anchor, token_id], special=True)
            self._texts[token_id] = text[len(self.decode(anchor, special=True)) :]
        return self._texts[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character only."""
        text = self.token_text(token_id)
        if _REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        if all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        return text.encode()

    @cached_property
    def _anchor(self) -> list[int]:
        return self._encode("a", special=False)


# Byte-level tokenizers write a byte as itself where it is a visible Latin-1 character, else from U+0100 on.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _VISIBLE)
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}


class TextStream:
    """Text from tokens as they are drawn: never half a character, and never what may be the start of a stop string.

    Each token costs one decoding of a short window, whatever the length of the text. `prompt` (its last tokens suffice)
    decides whether the first word begins with a space.
    """

    __slots__ = ("_decode", "_halves", "_held", "_ids", "_shown", "_stops", "stopped")

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, prompt: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._stops = tuple(stops)
        self._ids = list(prompt[-_CONTEXT:])
        self._shown = len(self._decode(self._ids).rstrip(_REPLACEMENT))
        self._halves = 0
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now. Empty once a stop string was found: that and what follows is left out."""
        if len(token_ids) == 1:
            return "" if self.stopped else self._push(token_ids[0])
        return "".join(self._push(token_id) for token_id in token_ids if not self.stopped)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        last = self._held + self._decode(self._ids)[self._shown :]
        self._held, self.stopped = "", True
        return last

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._whole(self._decode(self._ids))
        fresh, self._shown = text[self._shown :], max(self._shown, len(text))
        if len(self._ids) > _WINDOW and not self._halves:
            # Keep the last tokens only; not where that would cut a character in two.
            last = self._ids[-_CONTEXT:]
            text = self._decode(last)
            if _REPLACEMENT not in text or len(self._ids) > _LONGEST_WINDOW:
                self._ids, self._shown = last, len(text) - text.endswith(_REPLACEMENT)
        return self._release(fresh)

    def _whole(self, text: str) -> str:
        """The text without a last character in the making; bytes that never become one are shown as they are."""
        whole = text.rstrip(_REPLACEMENT)
        if len(whole) == len(text):
            self._halves = 0
        elif len(whole) > self._shown:
            self._halves = 1
        else:
            self._halves += 1
        if self._halves >= _MOST_HALVES:
            # The last may still be the beginning of one.
            self._halves, whole = 0, text[:-1]
        return whole

    def _release(self, fresh: str) -> str:
        if not self._stops:
            return fresh
        text = self._held + fresh
        # Of the stop strings that are there, the one that is complete first: as if the text had come by character.
        starts = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if ends:
            self._held, self.stopped = "", True
            return text[: min(ends)[1]]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


def _read(folder: str) -> Any:
    """By the class that its files name; by these files alone where that class cannot be loaded.

    transformers imports a model's code to find its tokenizer's class, and fails where a library that it finds installed
    (torchvision, say) does not match torch.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except ModuleNotFoundError:
        return PreTrainedTokenizerFast.from_pretrained(folder, **options)
