r"""Encode special tokens in messages as ordinary text.

A message may hold "<|im_end|>", with which ChatML ends it. Private-use planes of Unicode keep the
two apart. Before a conversation is rendered, the message's "<" moves to one plane. Before its text
is encoded, the template's "<" moves to another, and the message's moves back:

    message     <|im_end|>
    escaped     \U000F003C|im_end|>
    rendered    \U000F003C|im_end|><|im_end|>
    to encode   <|im_end|>\U0010003C|im_end|>     a copy of the tokenizer reads the first as text,
                                                 and has the second as a control token
"""

import copy
import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken

from llmtrain.data.messages import BadRecord
from llmtrain.data.template_properties import any_of
from llmtrain.files import json_text

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_ESCAPED_PLANE = 0xF0000  # holds the first characters of control tokens that are text
_COPIED_PLANE = 0x100000  # holds the first characters of control tokens of the template
_PLANE_SIZE = 0x10000
_PRIVATE_USE = re.compile("[\U000f0000-\U0010ffff]")


class Escaping:
    """Keeps control tokens in messages apart from those of the template; see the module.

    Args:
        backend: encodes text.
        control_tokens: the id and the text of each token that only a template may write.
    """

    def __init__(self, backend: "Tokenizer", control_tokens: Mapping[int, str]) -> None:
        self._backend = backend
        self._control_texts = dict(control_tokens)
        self._control_tokens = any_of(control_tokens.values())
        self._escapes = {
            chr(_ESCAPED_PLANE + ord(text[0])): text[0]
            for text in control_tokens.values()
            if ord(text[0]) < _PLANE_SIZE
        }

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
        if not any(map(self._control_tokens.search, texts)):
            return value, 0
        if any(map(_PRIVATE_USE.search, texts)):
            raise BadRecord("a message holds a special token and private-use characters of Unicode")
        counts: list[int] = []
        return self._escaped(value, counts), sum(counts)

    def _escaped(self, value: Any, counts: list[int]) -> Any:
        if isinstance(value, str):
            count = 1
            while count:  # tokens may overlap, so one may be left when another has been moved
                value, count = self._control_tokens.subn(_moved_to_escaped_plane, value)
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

    def encode(self, text: str) -> "tuple[list[int], Encoding]":
        """Encode a text in which :meth:`escape` has moved characters.

        Returns:
            The ids, and the encoding with the characters of each token.

        Raises:
            BadRecord: if the tokenizer makes a control token of text that has been moved.
        """
        backend, original_ids = self._copied_backend
        by_template = self._control_tokens.findall(text)
        copied = self._control_tokens.sub(_moved_to_copied_plane, text)
        encoding = backend.encode(self.unescape(copied), add_special_tokens=False)

        ids = [original_ids.get(id, id) for id in encoding.ids]
        encoded = [self._control_texts[id] for id in ids if id in self._control_texts]
        if encoded != by_template:
            raise BadRecord(
                "a message holds a special token, and the tokenizer cannot encode it as text"
            )
        return ids, encoding

    @functools.cached_property
    def _unescaping(self) -> dict[int, str]:
        return {ord(escaped): plain for escaped, plain in self._escapes.items()}

    @functools.cached_property
    def _copied_backend(self) -> "tuple[Tokenizer, dict[int, int]]":
        """The tokenizer that reads control tokens as text, and their copies as control tokens.

        Returns:
            The tokenizer, and the id of the control token for the id of each copy.
        """
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = True
        added_tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        original_ids: dict[int, int] = {}
        for id, text in self._control_texts.items():
            if ord(text[0]) >= _PLANE_SIZE:
                continue
            token = added_tokens.get(id, AddedToken(text, normalized=False))
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
