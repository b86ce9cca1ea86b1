"""Encode texts, and find the tokens of their beginnings without encoding those, too."""

import copy
import functools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

from llmtrain.data.escaping import Escaping
from llmtrain.data.template_properties import any_of
from llmtrain.data.tokenizer import FastTokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

# Longer ends of prompts are not remembered: they hold text that occurs once.
_LONGEST_REMEMBERED = 64
_MOST_REMEMBERED = 10_000


class Tokens:
    """The tokens of a text.

    Args:
        ids: their ids.
        encode: encodes the text again, with the characters of each token. That takes longer than
            the ids, and most texts do not need it.

    Attributes:
        ids: the ids.
    """

    def __init__(self, ids: list[int], encode: "Callable[[], Encoding]") -> None:
        self.ids = ids
        self._encode = encode

    @functools.cached_property
    def array(self) -> np.ndarray:
        """The ids, int32 [n]."""
        return np.array(self.ids, np.int32)

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The characters at which each token begins and ends."""
        return self._encode().offsets


class Controls(NamedTuple):
    """The control tokens among the tokens of a text.

    Attributes:
        indices: their indices, ascending.
        end_characters: the character at which each ends.
    """

    indices: list[int]
    end_characters: list[int]


class TextEncoder:
    """Encodes text with the tokenizer's control tokens, which messages cannot write.

    Args:
        tokenizer: the tokenizer.
        control_tokens: the id and the text of each token that only a template may write.

    Attributes:
        controls: matches a control token.
        control_texts: the text of each control token, by its id.
        border_texts: the control tokens among them at which a text is divided, whatever stands
            beside them.
        backend: encodes text without adding tokens at its ends.
        escaping: keeps control tokens in messages apart from those of the template.
    """

    def __init__(self, tokenizer: FastTokenizer, control_tokens: Mapping[int, str]) -> None:
        self.controls = any_of(control_tokens.values())
        self.control_texts = dict(control_tokens)

        # A copy, because other code sets up the tokenizer so that "<|im_end|>" is text. Without a
        # post-processor, which would add nothing here, but may remove white space from the offsets.
        self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False
        self.backend.post_processor = None

        self.border_texts = self._find_border_tokens()
        # Tables by id. Their last entry is for all larger ids, which are no control tokens.
        size = max(control_tokens, default=0) + 2
        self._is_control = np.zeros(size, bool)
        self._is_other_control = np.zeros(size, bool)  # at which a text is not always divided
        self._control_bytes = np.zeros(size, int)
        for id, text in control_tokens.items():
            self._is_control[id] = True
            self._is_other_control[id] = id not in self.border_texts
            self._control_bytes[id] = len(text.strip().encode())

        self._remembered: dict[tuple[int, str], list[int]] = {}
        self.escaping = Escaping(self.backend, control_tokens)

    def encode(self, text: str, has_escapes: bool = False) -> Tokens:
        """Encode a text.

        Args:
            text: the text.
            has_escapes: whether special tokens of messages in it are escaped.

        Raises:
            BadRecord: if the tokenizer makes a control token of a special token that is escaped.
        """
        if has_escapes:
            ids, encoded = self.escaping.encode(text)
            return Tokens(ids, encode=lambda: encoded)
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return Tokens(
            encoding.ids, encode=lambda: self.backend.encode(text, add_special_tokens=False)
        )

    # --- tokens of the beginning of a text

    def count_before(self, text: str, tokens: Tokens, controls: Controls, stop: int) -> int:
        """Return how many tokens of a text are exactly the tokens of its first characters.

        The tokens up to a control token do not depend on the text behind it, because tokenizers
        divide a text at such tokens first. The rest is encoded behind that token, and compared.

        Args:
            text: the text.
            tokens: its tokens.
            controls: their control tokens.
            stop: the number of characters.

        Returns:
            The number of tokens; -1 if the first characters have other tokens, or if the text has
            no control token at which it can be divided.
        """
        number = bisect_right(controls.end_characters, stop) - 1
        if number < 0:
            return -1
        index = controls.indices[number]
        end = controls.end_characters[number]
        control_id = tokens.ids[index]
        if control_id not in self.border_texts:
            return -1
        if end == stop:
            return index + 1

        rest = self._encode_behind(control_id, text[end:stop])
        count = index + 1 + len(rest)
        return count if tokens.ids[index + 1 : count] == rest else -1

    def count_to_control(self, tokens: Tokens, controls: Controls, stop: int) -> int:
        """Return how many tokens there are up to a control token at which a text can be divided.

        Args:
            tokens: the tokens of the text.
            controls: their control tokens.
            stop: the character at which the control token ends.

        Returns:
            The number of tokens; -1 if no such token ends there.
        """
        number = bisect_left(controls.end_characters, stop)
        if number == len(controls.end_characters) or controls.end_characters[number] != stop:
            return -1
        index = controls.indices[number]
        return index + 1 if tokens.ids[index] in self.border_texts else -1

    def controls_of(self, text: str, tokens: Tokens) -> Controls | None:
        """Find the control tokens among the tokens of a text.

        Returns:
            The control tokens; ``None`` if they are not those that the text shows.
        """
        indices = np.flatnonzero(self.are_controls(tokens.array)).tolist()
        matches = list(self.controls.finditer(text))
        encoded = [self.control_texts[tokens.ids[index]] for index in indices]
        if encoded != [match[0] for match in matches]:
            return None
        return Controls(indices, [match.end() for match in matches])

    # --- tokens that are control tokens

    def are_controls(self, ids: np.ndarray) -> np.ndarray:
        """Return whether tokens are control tokens, bool [n]."""
        return self._is_control.take(ids, mode="clip")

    def control_bytes(self, ids: np.ndarray) -> int:
        """Return the number of UTF-8 bytes of the control tokens among tokens."""
        return int(self._control_bytes.take(ids, mode="clip").sum())

    def fill(self, ids: np.ndarray, text: str) -> bool:
        """Return whether the tokens of a text certainly reach from its beginning to its end.

        Some tokenizers leave out white space, or characters that their normalizer removes. The
        answer is yes only if the text begins with a character that is always kept, and ends with a
        control token.
        """
        if not self._keeps_all_bytes or not text[:1].isascii() or not len(ids):
            return False
        last_token = self.border_texts.get(int(ids[-1]))
        if last_token is None or not text.endswith(last_token):
            return False
        return not self._is_other_control.take(ids, mode="clip").any()

    @functools.cached_property
    def _keeps_all_bytes(self) -> bool:
        """Whether the tokenizer divides all bytes of a text into tokens, as GPT-2 does."""
        normalizer = _settings_of(self.backend.normalizer)
        pre_tokenizer = _settings_of(self.backend.pre_tokenizer)
        steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
        *splits, last = steps
        has_all_bytes = all(
            self.backend.token_to_id(byte) is not None for byte in ByteLevel.alphabet()
        )
        return (
            normalizer.get("type", "NFC") == "NFC"
            and last.get("type") == "ByteLevel"
            and not last.get("add_prefix_space")
            and all(step.get("type") == "Split" for step in splits)
            and all(step.get("behavior") != "Removed" for step in splits)
            and has_all_bytes
        )

    def _find_border_tokens(self) -> dict[int, str]:
        """Return the control tokens at which a text is divided, whatever stands beside them."""
        added_tokens: dict[int, AddedToken] = self.backend.get_added_tokens_decoder()
        borders = {}
        for id, text in self.control_texts.items():
            token = added_tokens.get(id)
            if token is None or token.single_word or token.lstrip or token.rstrip:
                continue
            if token.normalized and self.backend.normalizer is not None:
                continue
            if text == text.strip():
                borders[id] = text
        return borders

    def _encode_behind(self, control_id: int, text: str) -> list[int]:
        """Return the tokens of a text that follows a control token."""
        key = (control_id, text)
        ids = self._remembered.get(key)
        if ids is None:
            after_control = self.control_texts[control_id] + text
            ids = self.backend.encode(after_control, add_special_tokens=False).ids[1:]
            if len(text) <= _LONGEST_REMEMBERED and len(self._remembered) < _MOST_REMEMBERED:
                self._remembered[key] = ids
        return ids


def _settings_of(component: Any) -> dict[str, Any]:
    """Return the settings of a part of a tokenizer; an empty dictionary if it has no such part."""
    if component is None:
        return {}
    settings: dict[str, Any] = json.loads(component.__getstate__())
    return settings
