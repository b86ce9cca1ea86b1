"""Encode prompts and completions of plain text, for models without a chat template."""

from collections.abc import Collection
from typing import TypeAlias

import numpy as np

from llmtrain.data.formats import (
    Conversation,
    PlainConversation,
    PlainPreferenceRecord,
    PreferenceRecord,
)
from llmtrain.data.messages import BadRecord, Message
from llmtrain.data.render import Rendered, Renderer, TokenSequence, TurnEnd, cut
from llmtrain.data.text_encoder import TextEncoder
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos


class PlainTextRenderer:
    """Makes documents of a prompt, its completion and EOS, without a chat template.

    It has the interface of :class:`llmtrain.data.render.Renderer`. A document begins with BOS if
    the tokenizer begins every text with it. Only the completion and EOS are trained. Special tokens
    in the texts are encoded as ordinary text, except for one EOS at the end of a completion, which
    is the EOS of the document.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer, _control_tokens(tokenizer))
        self._eos = str(tokenizer.eos_token)
        self._eos_id = int(tokenizer.eos_token_id)
        self._beginning: list[int] = []
        if begins_with_bos(tokenizer):
            self._beginning = [int(tokenizer.bos_token_id)]

    def __reduce__(self) -> tuple[type["PlainTextRenderer"], tuple[FastTokenizer]]:
        return PlainTextRenderer, (self.tokenizer,)

    @property
    def stop_token_ids(self) -> set[int]:
        """The token at which a completion ends."""
        return {self._eos_id}

    def __call__(self, conversation: Conversation, after: int | None = None) -> Rendered:
        """Encode a prompt and its completion.

        Args:
            conversation: the prompt and the completion.
            after: not used; the completion is the only turn.

        Raises:
            BadRecord: if they are not plain texts, or if their text cannot be used.
        """
        if not isinstance(conversation, PlainConversation):
            raise _not_plain_text()
        prompt, completion = (message["content"] for message in conversation.messages)
        document, special_as_text = self._document(prompt, completion)
        return Rendered([document], special_as_text=special_as_text)

    def render_answers(self, record: PreferenceRecord) -> Rendered:
        """Encode the prompt of a record with each of its answers.

        Returns:
            A document for each answer.

        Raises:
            BadRecord: if they are not plain texts, or if their text cannot be used.
        """
        documents = [self.render_answer(record, answer) for answer in record.answers]
        completions = [self._without_eos(answer[0]["content"]) for answer in record.answers]
        _, special_as_text = self.encoder.escape([record.prompt[0]["content"], *completions])
        return Rendered(documents, special_as_text=special_as_text)

    def render_answer(self, record: PreferenceRecord, answer: list[Message]) -> TokenSequence:
        """Encode the prompt of a record and an answer to it. Only the answer is trained."""
        if not isinstance(record, PlainPreferenceRecord):
            raise _not_plain_text()
        document, _ = self._document(record.prompt[0]["content"], answer[0]["content"])
        return document

    def cut(self, document: TokenSequence, width: int) -> TokenSequence:
        """Return the first ``width`` tokens of a document, without the ends of its turns."""
        return cut(document, width, self.encoder)

    def _without_eos(self, completion: str) -> str:
        """Drop one EOS from the end of a completion: every document ends with it anyway."""
        return completion.removesuffix(self._eos)

    def _document(self, prompt: str, completion: str) -> tuple[TokenSequence, int]:
        """Encode a prompt and its completion.

        If the last characters of the prompt and the first of the completion became one token, the
        completion is encoded without the prompt: a model that completes begins with a new token.

        Returns:
            The document, and the number of special tokens that are encoded as text.
        """
        completion = self._without_eos(completion)
        try:
            completion_bytes = len(completion.encode())
            prompt.encode()
        except UnicodeEncodeError:
            raise BadRecord(
                "the record holds half of a surrogate pair, which is not valid text"
            ) from None
        (prompt, completion), special_as_text = self.encoder.escape([prompt, completion])
        has_escapes = special_as_text > 0

        prompt_ids = self.encoder.encode(prompt, has_escapes).ids
        ids = self.encoder.encode(prompt + completion, has_escapes).ids
        if ids[: len(prompt_ids)] != prompt_ids:
            ids = prompt_ids + self.encoder.encode(completion, has_escapes).ids
        ids = [*self._beginning, *ids, self._eos_id]

        loss_mask = np.zeros(len(ids), bool)
        loss_mask[len(self._beginning) + len(prompt_ids) :] = True
        loss_mask[:1] = False  # the first token has no context
        document = TokenSequence(
            ids=np.array(ids, np.int32),
            loss_mask=loss_mask,
            target_bytes=completion_bytes,
            turn_ends=(
                TurnEnd(
                    length=len(ids),
                    targets=int(loss_mask.sum()),
                    target_bytes=completion_bytes,
                    ended=1,
                ),
            ),
        )
        return document, special_as_text


AnyRenderer: TypeAlias = Renderer | PlainTextRenderer


def make_renderer(
    tokenizer: FastTokenizer,
    stop_token_ids: Collection[int] = (),
    only_last_turns: bool = False,
) -> AnyRenderer:
    """Return the renderer for a tokenizer: with its chat template, or of plain text if it has none.

    Args:
        tokenizer: the tokenizer.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        only_last_turns: train only the turns after the last user message.
    """
    if tokenizer.chat_template is None:
        return PlainTextRenderer(tokenizer)
    return Renderer(tokenizer, stop_token_ids, only_last_turns)


def _control_tokens(tokenizer: FastTokenizer) -> dict[int, str]:
    """Return the special tokens and EOS."""
    tokens = {
        id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    tokens.setdefault(int(tokenizer.eos_token_id), str(tokenizer.eos_token))
    return tokens


def _not_plain_text() -> BadRecord:
    return BadRecord(
        "the record is not plain text (a prompt and completions without roles and tools), and "
        "there is no chat template; use --chat_template chatml"
    )
