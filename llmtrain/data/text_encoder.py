"""Encode the text of conversations, in which special tokens of messages are ordinary text.

A message may hold "<|im_end|>", with which ChatML ends it. Private-use planes of Unicode keep the
two apart. Before a conversation is rendered, the message's "<" moves to one plane. Before its text
is encoded, the template's "<" moves to another, and the message's moves back:

    message     <|im_end|>
    escaped     \\U000F003C|im_end|>
    rendered    \\U000F003C|im_end|><|im_end|>
    encoded     <|im_end|>\\U0010003C|im_end|>     a copy of the tokenizer reads the first as text,
                                                 and has the second as a control token
"""

import copy
import functools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

from llmtrain.data.messages import BadRecord
from llmtrain.data.template_properties import any_of
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.files import json_text

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_ESCAPED_PLANE = 0xF0000  # holds the first characters of control tokens that are text
_COPIED_PLANE = 0x100000  # holds the first characters of control tokens of the template
_PLANE_SIZE = 0x10000
_PRIVATE_USE = re.compile("[\U000f0000-\U0010ffff]")
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
        ends: the character at which each ends.
    """

    indices: list[int]
    ends: list[int]


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

        self._added_tokens: dict[int, AddedToken] = self.backend.get_added_tokens_decoder()
        self.border_texts = self._find_border_tokens()
        # Tables by id. Their last entry is for all larger ids, which are no control tokens.
        self._is_control = np.zeros(max(control_tokens) + 2, bool)
        self._is_border = np.zeros(len(self._is_control), bool)
        self._control_bytes = np.zeros(len(self._is_control), int)
        for id, text in control_tokens.items():
            self._is_control[id] = True
            self._is_border[id] = id in self.border_texts
            self._control_bytes[id] = len(text.strip().encode())

        self._remembered: dict[tuple[int, str], list[int]] = {}
        self._escapes = {
            chr(_ESCAPED_PLANE + ord(text[0])): text[0]
            for text in control_tokens.values()
            if ord(text[0]) < _PLANE_SIZE
        }

    def encode(self, text: str, has_escapes: bool = False) -> Tokens:
        """Encode a text.

        Args:
            text: the text.
            has_escapes: whether :meth:`escape` has moved characters in it.

        Raises:
            BadRecord: if the tokenizer makes a control token of text that :meth:`escape` has moved.
        """
        if has_escapes:
            return self._encode_escaped(text)
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return Tokens(
            encoding.ids, encode=lambda: self.backend.encode(text, add_special_tokens=False)
        )

    # --- control tokens that are text

    def escape(self, value: Any) -> tuple[Any, int]:
        """Move the first character of each control token to a private-use plane.

        Args:
            value: a text, or a JSON value with texts. It stays as it is.

        Returns:
            The value with texts of the same lengths, and the number of control tokens in them. If
            there are none, it is the value itself.

        Raises:
            BadRecord: if a control token cannot be moved.
        """
        texts = texts_of(value)
        if not any(map(self.controls.search, texts)):
            return value, 0
        if any(map(_PRIVATE_USE.search, texts)):
            raise BadRecord("a message holds a special token and private-use characters of Unicode")
        counts: list[int] = []
        return self._escaped(value, counts), sum(counts)

    def _escaped(self, value: Any, counts: list[int]) -> Any:
        if isinstance(value, str):
            count = 1
            while count:  # tokens may overlap, so one may be left when another has been moved
                value, count = self.controls.subn(_moved_to_escaped_plane, value)
                counts.append(count)
            return value
        if isinstance(value, dict):
            return {
                self._escaped(key, counts): self._escaped(inner, counts)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self._escaped(inner, counts) for inner in value]
        return value

    def unescape(self, text: str) -> str:
        """Move the characters back that :meth:`escape` has moved."""
        return text.translate(self._unescaping)

    def check_json(self, text: str) -> None:
        """Raise :class:`BadRecord` if a template has written moved characters as JSON escapes."""
        for escaped in self._escapes:
            if json_text(escaped)[1:-1] in text:
                raise BadRecord(
                    "a message holds a special token, which the chat template writes as \\u escapes"
                )

    @functools.cached_property
    def _unescaping(self) -> dict[int, str]:
        return {ord(escaped): plain for escaped, plain in self._escapes.items()}

    @functools.cached_property
    def _escaping_backend(self) -> "tuple[Tokenizer, dict[int, int]]":
        """The tokenizer that reads control tokens as text, and their copies as control tokens.

        Returns:
            The tokenizer, and the id of the control token for the id of each copy.
        """
        backend = copy.deepcopy(self.backend)
        backend.encode_special_tokens = True
        original_ids: dict[int, int] = {}
        for id, text in self.control_texts.items():
            if ord(text[0]) >= _PLANE_SIZE:
                continue
            token = self._added_tokens.get(id, AddedToken(text, normalized=False))
            flags = {
                "single_word": token.single_word,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "normalized": token.normalized,
            }
            # The setting above is about special tokens; not all control tokens are.
            backend.add_special_tokens([AddedToken(text, special=True, **flags)])
            moved = _moved(text, _COPIED_PLANE)
            backend.add_tokens([AddedToken(moved, special=False, **flags)])
            copy_id = backend.token_to_id(moved)
            assert copy_id is not None, "the token was just added"
            original_ids[copy_id] = id
        return backend, original_ids

    def _encode_escaped(self, text: str) -> Tokens:
        """Encode a text in which :meth:`escape` has moved characters."""
        backend, original_ids = self._escaping_backend
        by_template = self.controls.findall(text)
        copied = self.controls.sub(_moved_to_copied_plane, text)
        encoding = backend.encode(self.unescape(copied), add_special_tokens=False)

        ids = [original_ids.get(id, id) for id in encoding.ids]
        encoded = [self.control_texts[id] for id in ids if id in self.control_texts]
        if encoded != by_template:
            raise BadRecord(
                "a message holds a special token, and the tokenizer cannot encode it as text"
            )
        return Tokens(ids, encode=lambda: encoding)

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
        number = bisect_right(controls.ends, stop) - 1
        if number < 0:
            return -1
        index = controls.indices[number]
        end = controls.ends[number]
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
        number = bisect_left(controls.ends, stop)
        if number == len(controls.ends) or controls.ends[number] != stop:
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
        are_controls: np.ndarray = self._is_control[self._clipped(ids)]
        return are_controls

    def control_bytes(self, ids: np.ndarray) -> int:
        """Return the UTF-8 bytes of the control tokens among tokens."""
        return int(self._control_bytes[self._clipped(ids)].sum())

    def fill(self, ids: np.ndarray, text: str) -> bool:
        """Return whether the tokens of a text certainly reach from its beginning to its end.

        Some tokenizers leave out white space, or characters that their normalizer removes. Here
        the text begins with a character that is always kept, and ends with a control token.
        """
        if not self._keeps_all_bytes or not text[:1].isascii() or not len(ids):
            return False
        last_token = self.border_texts.get(int(ids[-1]))
        if last_token is None or not text.endswith(last_token):
            return False
        numbers = self._clipped(ids)
        return bool((self._is_control[numbers] == self._is_border[numbers]).all())

    def _clipped(self, ids: np.ndarray) -> np.ndarray:
        """Return the places of tokens in the tables by id, int [n]."""
        clipped: np.ndarray = np.minimum(ids, len(self._is_control) - 1)
        return clipped

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
        borders = {}
        for id, text in self.control_texts.items():
            token = self._added_tokens.get(id)
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


def texts_of(value: object) -> list[str]:
    """Return all texts in a JSON value, with the keys of objects."""
    texts: list[str] = []
    _collect_texts(value, texts)
    return texts


def _collect_texts(value: object, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str):
                texts.append(key)
            if isinstance(inner, str):  # the usual case, without another call
                texts.append(inner)
            else:
                _collect_texts(inner, texts)
    elif isinstance(value, list):
        for inner in value:
            _collect_texts(inner, texts)


def _moved(text: str, plane: int) -> str:
    """Move the first character of a text to another plane of Unicode.

    Raises:
        BadRecord: if the character is not in the first plane.
    """
    if ord(text[0]) >= _PLANE_SIZE:
        raise BadRecord(f"a message holds {text}, which cannot be encoded as text")
    return chr(plane + ord(text[0])) + text[1:]


def _moved_to_escaped_plane(match: re.Match[str]) -> str:
    return _moved(match[0], _ESCAPED_PLANE)


def _moved_to_copied_plane(match: re.Match[str]) -> str:
    return _moved(match[0], _COPIED_PLANE)
