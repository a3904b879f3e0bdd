"""Tokens to text, one token at a time, and stop strings in that text.

The decode stream is that of the tokenizer's own library, primed with the prompt as in vLLM: a character whose
bytes come in several tokens appears with the last of them, never as a replacement sign before that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightline.errors import FormatError, InvalidInput

if TYPE_CHECKING:
    from weightline.generate.sampling import SamplingParams

_INVALID_PREFIX = "Invalid prefix encountered"
"""How the tokenizer's library says that bytes before the new ones decode otherwise now."""
_INCOMPLETE = "\ufffd"
_CONTEXT = 4
"""Tokens before one that may complete its character, at most: UTF-8 has no longer ones."""


class TextTokenizer:
    """The tokenizer of a model folder, with its chat template."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.core: Any = wrapped._tokenizer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around a text."""
        return [int(t) for t in self.core.encode(text, add_special_tokens=special).ids]

    def decode(self, tokens: list[int], *, skip_special: bool = False) -> str:
        """Text of all `tokens` together."""
        return str(self.core.decode(tokens, skip_special_tokens=skip_special))

    def chat(self, messages: list[dict[str, Any]], *, generate: bool, options: dict[str, Any]) -> str:
        """The prompt that the chat template makes. Raises `InvalidInput` for messages that it refuses, and
        without a template.
        """
        if not self._wrapped.chat_template:
            raise InvalidInput("the model has no chat template", hint="use /v1/completions")
        try:
            return str(
                self._wrapped.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=generate, **options
                )
            )
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            what = (str(error).splitlines() or [repr(error)])[0]
            raise InvalidInput(
                f"messages: the chat template refuses them: {what}",
                hint="see the model's chat_template",
            ) from error

    def token_text(self, token: int, before: list[int]) -> str:
        """Text that `token` adds after the output tokens `before`: all of a character for the token that ends
        it, nothing for those before.
        """
        alone = self.decode([token])
        if not alone.endswith(_INCOMPLETE):
            return alone
        for count in range(1, min(len(before), _CONTEXT) + 1):
            context = before[-count:]
            whole = self.decode([*context, token])
            if whole.endswith(_INCOMPLETE):
                continue
            clean = len(context)
            while clean and self.decode([context[clean - 1]]).endswith(_INCOMPLETE):
                clean -= 1
            return whole[len(self.decode(context[:clean])) if clean else 0 :]
        return ""


def load_tokenizer(folder: Path) -> TextTokenizer | None:
    """The folder's tokenizer, or None when it has none. Raises `FormatError` for one that cannot be read."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    try:
        return TextTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True, use_fast=True))
    except Exception as error:  # the library raises bare `Exception` for a damaged file
        raise FormatError(
            f"{folder / 'tokenizer.json'} is not understood: {error}",
            hint="write the folder's tokenizer anew",
        ) from error


class TextStream:
    """The text of one sequence as its tokens come; finds stop strings. Only the engine thread uses it."""

    def __init__(self, tokenizer: TextTokenizer, prompt: tuple[int, ...], params: SamplingParams) -> None:
        from tokenizers.decoders import DecodeStream

        self._new_stream = DecodeStream
        self._core = tokenizer.core
        self._skip = params.skip_special_tokens
        self._stream: Any = DecodeStream(ids=list(prompt), skip_special_tokens=self._skip)
        self._stops = params.stop
        self._keep = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        held = bool(self._stops) and not self._keep
        self._held_back = max(len(s) for s in self._stops) - 1 if held else 0
        """Characters at the end that a stop string may still claim."""
        self._sent = 0
        self._tokens = 0
        self.text = ""

    def push(self, token: int, *, stopped: bool) -> str | None:
        """Take the next token; returns the stop string that it completes. `stopped`: it is a stop token,
        which has no text unless stops are kept.
        """
        before = len(self.text)
        self._tokens += 1
        if not stopped or self._keep:
            self.text += self._decode(token)
        added = len(self.text) - before
        if not added or self._tokens <= self._min_tokens:
            return None
        found = [(at + len(s), i, at) for i, s in enumerate(self._stops) if (at := self._find(s, added)) >= 0]
        if not found:
            return None
        end, which, start = min(found)
        self.text = self.text[: end if self._keep else start]
        return self._stops[which]

    def _find(self, stop: str, added: int) -> int:
        return self.text.find(stop, max(0, len(self.text) - added - len(stop) + 1))

    def _decode(self, token: int) -> str:
        try:
            return self._stream.step(self._core, token) or ""
        except Exception as error:  # the library has no class of its own for it
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._stream = self._new_stream(skip_special_tokens=self._skip)
            return self._stream.step(self._core, token) or ""

    def take(self, *, final: bool) -> str:
        """Text that can be told by now and was not yet; with `final` all of it."""
        end = max(self._sent, len(self.text) - (0 if final else self._held_back))
        new, self._sent = self.text[self._sent : end], end
        return new
