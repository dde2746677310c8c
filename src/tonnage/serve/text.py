"""Text to token ids and back, by the model's own files: no download, none of its code. Knows no engine, no server."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tonnage.errors import BadModel, MissingPart, RequestError
from tonnage.serve.sampling import AnswerDelta, Sampling

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
# What decoders emit for invalid UTF-8; at the end of a text it may be an incomplete character.
_REPLACEMENT = "\ufffd"
# A stream decodes the last tokens again with each new one: a space or a character may depend on earlier ones.
_CONTEXT, _WINDOW, _LONGEST_WINDOW = 6, 24, 256
# A character has at most four bytes, so more tokens are not an incomplete character.
_MOST_HALVES = 4


class Tokenizer:
    """A transformers tokenizer, reduced to what serving needs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The underlying library decodes in a tenth of the wrapper's time.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # Set once, so that threads may encode concurrently.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer | None":
        """Load the tokenizer in a model's folder; None if the folder has none."""
        if not any((Path(folder) / name).is_file() for name in _FILES):
            return None
        try:
            return cls(_read(str(folder)))
        except ImportError:
            raise MissingPart("A tokenizer needs transformers.", hint="pip install 'tonnage[serve]'") from None
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            hint = "Put the model's own tokenizer.json there, or serve token ids from a folder without tokenizer."
            raise BadModel(f"The tokenizer in {folder} cannot be read: {reason}", hint=hint) from None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text, including the tokenizer's special prefix unless told otherwise."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids; `special` shows special tokens."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=not special))
        return str(self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, ending with the prompt for the assistant's reply."""
        if not self._tokenizer.chat_template:
            hint = "Use /v1/completions, or a model with a chat template."
            raise RequestError("This model's tokenizer has no chat template.", hint=hint)
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # the template's own complaint: roles that must alternate, no system message
            reason = str(error).strip().partition("\n")[0]
            problem = f"The model's chat template refuses these messages: {reason}"
            raise RequestError(problem, hint="Change the messages or their order.") from None
        return self.encode(text, special=False)

    def token_text(self, token_id: int) -> str:
        """Return one token as it reads inside a text, with its leading space; special tokens are shown."""
        if token_id not in self._texts:
            anchor = self._anchor
            text = self.decode([*anchor, token_id], special=True)
            self._texts[token_id] = text[len(self.decode(anchor, special=True)) :]
        return self._texts[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
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
        return self.encode("a", special=False)


# Byte-level tokenizers write a byte as itself if it is a visible Latin-1 character, else from U+0100 on.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _VISIBLE)
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}


class TextStream:
    """Text from tokens, without half a character or the start of a stop string; `prompt` decides if a space comes first."""

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
        """Return the text that is certain now. A stop string and what follows it are dropped."""
        if len(token_ids) == 1:
            return "" if self.stopped else self._push(token_ids[0])
        return "".join(self._push(token_id) for token_id in token_ids if not self.stopped)

    def finish(self) -> str:
        """Return what was held back, after the last token."""
        if self.stopped:
            return ""
        last = self._held + self._decode(self._ids)[self._shown :]
        self._held, self.stopped = "", True
        return last

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # Leave out an incomplete last character; bytes that never form one are shown as they are.
        whole = text.rstrip(_REPLACEMENT)
        if len(whole) == len(text):
            self._halves = 0
        else:
            self._halves = 1 if len(whole) > self._shown else self._halves + 1
            if self._halves >= _MOST_HALVES:
                # The last may still be the start of one.
                self._halves, whole = 0, text[:-1]
        text = whole
        fresh, self._shown = text[self._shown :], max(self._shown, len(text))
        if len(self._ids) > _WINDOW and not self._halves:
            # Keep only the last tokens, unless that would split a character.
            last = self._ids[-_CONTEXT:]
            text = self._decode(last)
            if _REPLACEMENT not in text or len(self._ids) > _LONGEST_WINDOW:
                self._ids, self._shown = last, len(text) - text.endswith(_REPLACEMENT)
        return self._release(fresh)

    def _release(self, fresh: str) -> str:
        if not self._stops:
            return fresh
        text = self._held + fresh
        # Of the stop strings present, use the one completed first, as if the text had arrived by character.
        starts = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if ends:
            self._held, self.stopped = "", True
            return text[: min(ends)[1]]
        # Hold back as much of the end as may be the start of a stop string.
        held = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            held = max(held, len(text) - start if start >= 0 else 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class Answer:
    """One answer of a request, as generated so far: the one place where stop strings end an answer."""

    def __init__(self, index: int, prompt: Sequence[int], sampling: Sampling, tokenizer: Tokenizer | None) -> None:
        self.index, self._sampling = index, sampling
        self._stream = TextStream(tokenizer, sampling.stop, prompt=prompt[-_CONTEXT:]) if tokenizer else None
        self._held = AnswerDelta(index)
        self._told: list[AnswerDelta] = []
        self.tokens = 0
        self.characters = 0  # streamed so far, for the offsets of log probabilities
        self.finished = False

    def take(self, delta: AnswerDelta) -> AnswerDelta | None:
        """Add tokens; return what can be sent now, or None if text is held back, or dropped after a stop string."""
        if self.finished:
            return None
        held, stream = self._held, self._stream
        texts: list[str] = []
        for position, token_id in enumerate(delta.token_ids):
            held.token_ids.append(token_id)
            if delta.logprobs:
                held.logprobs.append(delta.logprobs[position])
            # Stop tokens are not part of the text.
            if stream is not None and token_id not in self._sampling.stop_token_ids:
                texts.append(stream.push((token_id,)))
                if stream.stopped:
                    held.finish_reason = "stop"
                    break
        if delta.finish_reason is not None and held.finish_reason is None:
            texts.append(stream.finish() if stream is not None else "")
            held.finish_reason = delta.finish_reason
        held.text += "".join(texts)
        if not held.text and held.finish_reason is None and (stream is not None or not held.token_ids):
            return None
        self._held = AnswerDelta(self.index)
        self._told.append(held)
        self.tokens += len(held.token_ids)
        self.finished = held.finish_reason is not None
        return held

    @property
    def all(self) -> AnswerDelta:
        """Everything that was sent."""
        return AnswerDelta(
            self.index,
            "".join(piece.text for piece in self._told),
            [token_id for piece in self._told for token_id in piece.token_ids],
            [logprob for piece in self._told for logprob in piece.logprobs],
            self._told[-1].finish_reason if self._told else None,
        )


def _read(folder: str) -> Any:
    """Load by the class that its files name, or from the files alone if that class imports a library that fails."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except ModuleNotFoundError:
        return PreTrainedTokenizerFast.from_pretrained(folder, **options)
