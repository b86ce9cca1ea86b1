r"""Encode the text of a template, in which special tokens of messages are ordinary text.

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
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken

from llmtrain.data.chat_template import Span, any_of
from llmtrain.data.messages import BadRecord
from llmtrain.data.tokenizer import FastTokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_PLANE_SIZE = 0x10000
_ESCAPED_PLANE = 0xF0000  # holds the first characters of control tokens that are text
_COPIED_PLANE = 0x100000  # holds the first characters of control tokens of the template
_PRIVATE_USE = re.compile("[\U000f0000-\U0010ffff]")
_ESCAPED_IN_JSON = re.compile(r"\\udb[89ab]")  # a character of the plane that JSON has escaped
# Few texts stand between the last control token of a prompt and its end.
_REMEMBERED_TEXTS = 1_000


class Continuation(NamedTuple):
    """The tokens of a text that follows another one.

    Attributes:
        ids_before: the tokens of the other one.
        ids: the tokens of the text.
        spans: the characters of each, if they were asked for.
        is_joined: whether the two are the tokens of both texts as one.
    """

    ids_before: list[int]
    ids: list[int]
    spans: list[Span]
    is_joined: bool


class TextEncoder:
    """Encodes text with control tokens that messages cannot write.

    Args:
        tokenizer: the tokenizer.
        control_tokens: the id and the text of each token that only a template may write.

    Attributes:
        borders: matches a control token at which every text is divided. The tokens from there on do
            not depend on the text before it, nor do the tokens before it depend on the text from
            there on.
    """

    def __init__(self, tokenizer: FastTokenizer, control_tokens: Mapping[int, str]) -> None:
        self._control_texts = dict(control_tokens)
        self._controls = any_of(control_tokens.values())

        # A copy, because other code sets up the tokenizer so that "<|im_end|>" is text. Without a
        # post-processor, which would add nothing here, but may remove white space from the offsets.
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        backend.post_processor = None
        self._backend: Tokenizer = backend

        borders = []
        added_tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        for id, text in control_tokens.items():
            token = added_tokens.get(id)
            if token is None or token.single_word or token.lstrip or token.rstrip:
                continue
            if token.normalized and backend.normalizer is not None:
                continue
            if text == text.strip():
                borders.append(text)
        self.borders = any_of(borders)
        self._encode_often = functools.lru_cache(_REMEMBERED_TEXTS)(self.encode)
        self._unescaping = {
            _ESCAPED_PLANE + ord(text[0]): text[0]
            for text in control_tokens.values()
            if ord(text[0]) < _PLANE_SIZE
        }

    def escaped(self, value: Any, counts: Counter[str]) -> Any:
        """Return a JSON value whose texts hold no control tokens: their first characters are moved.

        Values that are no JSON become their names, as in transformers: templates must not call
        their methods.

        Args:
            value: a text, a message, or another value. It stays as it is.
            counts: the number of control tokens in the value, ``special_as_text``, is added, and
                ``private_use``, the number of texts with characters of the planes.

        Raises:
            BadRecord: if a control token cannot be moved.
            UnicodeEncodeError: if a text holds half of a surrogate pair.
        """
        if isinstance(value, str):
            value.encode()
            if not value.isascii() and _PRIVATE_USE.search(value):
                counts["private_use"] += 1
            count = 1
            while count:  # tokens may overlap, so one may be left when another has been moved
                value, count = self._controls.subn(
                    lambda match: _moved(match, _ESCAPED_PLANE), value
                )
                counts["special_as_text"] += count
            return value
        if isinstance(value, dict):
            return {
                self.escaped(key, counts): self.escaped(inner, counts)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self.escaped(inner, counts) for inner in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return f"<{type(value).__name__}>"

    def check_escapes(self, counts: Counter[str], rendered: str = "") -> None:
        """Check that all characters that were moved can be moved back.

        Args:
            counts: the counts of :meth:`escaped`.
            rendered: the text that a template has made of the escaped texts.

        Raises:
            BadRecord: if a text has such characters of its own, or if the template has written
                them as JSON escapes.
        """
        if not counts["special_as_text"]:
            return
        if counts["private_use"]:
            raise BadRecord("a message holds a special token and private-use characters of Unicode")
        if _ESCAPED_IN_JSON.search(rendered):
            raise BadRecord(
                "a message holds a special token, which the chat template writes as \\u escapes"
            )

    def plain_bytes(self, text: str) -> int:
        """Return the UTF-8 bytes of a text without its control tokens."""
        without_controls = self._controls.sub("", text)
        return len(without_controls.translate(self._unescaping).encode())

    def encode(self, text: str, has_escapes: bool = False) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: the text.
            has_escapes: whether special tokens of messages in it are escaped.

        Raises:
            BadRecord: if the tokenizer makes a control token of a special token that is escaped.
        """
        if has_escapes:
            return self._encode_escaped(text)[0]
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _encode_with_spans(self, text: str, has_escapes: bool) -> tuple[list[int], list[Span]]:
        """Return the tokens of a text, and the characters of each; see :meth:`encode`.

        That takes longer. A control token may include the white space around it in the text, which
        is not among its characters here.
        """
        if has_escapes:
            ids, encoding = self._encode_escaped(text)
        else:
            encoding = self._backend.encode(text, add_special_tokens=False)
            ids = encoding.ids
        spans = []
        for id, (start, stop) in zip(ids, encoding.offsets, strict=True):
            token = text[start:stop]
            if id in self._control_texts:
                token = token.strip()
            first = text.index(token, start)
            spans.append((first, first + len(token)))
        return ids, spans

    def encode_after(
        self, text: str, following: str, has_escapes: bool, with_spans: bool = False
    ) -> Continuation:
        """Encode a text, and another text that follows it.

        If the last characters of the first and the first of the other became one token, the other
        text is encoded by itself: a model that answers begins with a new token.

        Args:
            text: the first text.
            following: the other text.
            has_escapes: whether special tokens of messages in them are escaped.
            with_spans: find the characters of each token of the other text. That takes longer.
        """
        ids = self.encode(text, has_escapes) if has_escapes else self._encode_often(text)
        spans: list[Span] = []
        if with_spans:
            both, spans = self._encode_with_spans(text + following, has_escapes)
        else:
            both = self.encode(text + following, has_escapes)

        count = len(ids)
        if both[:count] == ids:
            shifted = [(start - len(text), stop - len(text)) for start, stop in spans[count:]]
            return Continuation(ids, both[count:], shifted, is_joined=True)
        following_ids, spans = self._encode_with_spans(following, has_escapes)
        return Continuation(ids, following_ids, spans, is_joined=False)

    def last_border(self, text: str) -> int:
        """Return where the last border of a text begins; 0 if it has none."""
        start = 0
        for border in self.borders.finditer(text):
            start = border.start()
        return start

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, without control tokens."""
        ordinary = [id for id in ids if id not in self._control_texts]
        text: str = self._backend.decode(ordinary, skip_special_tokens=False)
        return text

    def _encode_escaped(self, text: str) -> "tuple[list[int], Encoding]":
        backend, original_ids = self._copied_backend
        by_template = self._controls.findall(text)
        copied = self._controls.sub(lambda match: _moved(match, _COPIED_PLANE), text)
        encoding = backend.encode(copied.translate(self._unescaping), add_special_tokens=False)

        ids = [original_ids.get(id, id) for id in encoding.ids]
        encoded = [self._control_texts[id] for id in ids if id in self._control_texts]
        if encoded != by_template:
            raise BadRecord(
                "a message holds a special token, and the tokenizer cannot encode it as text"
            )
        return ids, encoding

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
            moved = chr(_COPIED_PLANE + ord(text[0])) + text[1:]
            backend.add_tokens([AddedToken(moved, special=False, **flags)])
            copy_id = backend.token_to_id(moved)
            assert copy_id is not None, "the token was just added"
            original_ids[copy_id] = id
        return backend, original_ids


def _moved(match: re.Match[str], plane: int) -> str:
    """Move the first character of a control token to another plane of Unicode.

    Raises:
        BadRecord: if the character is not in the first plane.
    """
    text = match[0]
    if ord(text[0]) >= _PLANE_SIZE:
        raise BadRecord(f"a message holds {text}, which cannot be encoded as text")
    return chr(plane + ord(text[0])) + text[1:]
