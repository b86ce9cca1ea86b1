"""Encode prompts and completions that are plain text, for models without a chat template."""

from collections import Counter

import numpy as np

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.rendered import Rendered, TokenSequence, TurnEnd
from llmtrain.data.text_encoder import TextEncoder
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos


class PromptCompletionRenderer:
    """Makes a token sequence of a prompt, its completion and EOS, without a chat template.

    It has the interface of :class:`llmtrain.data.render.Renderer`. A sequence begins with BOS if
    the tokenizer begins every text with it. Only the completion and EOS are trained. Special tokens
    in the texts are encoded as ordinary text, except for one EOS at the end of a completion, which
    is the EOS of the sequence.

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

    def __reduce__(self) -> tuple[type["PromptCompletionRenderer"], tuple[FastTokenizer]]:
        return PromptCompletionRenderer, (self.tokenizer,)

    @property
    def stop_token_ids(self) -> set[int]:
        """The token at which a completion ends."""
        return {self._eos_id}

    def __call__(self, record: Conversation | PreferenceRecord) -> Rendered:
        """Encode a prompt with its completion, or with each of its answers.

        Raises:
            BadRecord: if they are not plain texts, or if their text cannot be used.
        """
        if not record.is_plain_text:
            raise BadRecord(
                "the record is not plain text (a prompt and completions without roles and tools), "
                "and there is no chat template; use --chat_template chatml"
            )
        prompt, *completions = (message["content"] for message in record.messages)
        # Every sequence ends with EOS anyway.
        completions = [completion.removesuffix(self._eos) for completion in completions]
        sequences = [self._sequence(prompt, completion) for completion in completions]
        # The prompt, which is in all sequences, is counted once.
        _, special_as_text = self.encoder.escaping.escape([prompt, *completions])
        return Rendered(
            sequences, counts=Counter(special_as_text=special_as_text), unread_fields=Counter()
        )

    def _sequence(self, prompt: str, completion: str) -> TokenSequence:
        """Encode a prompt and its completion.

        If the last characters of the prompt and the first of the completion became one token, the
        completion is encoded without the prompt: a model that completes begins with a new token.
        """
        try:
            completion_bytes = len(completion.encode())
            prompt.encode()
        except UnicodeEncodeError:
            raise BadRecord(
                "the record holds half of a surrogate pair, which is not valid text"
            ) from None
        (prompt, completion), special_as_text = self.encoder.escaping.escape([prompt, completion])
        has_escapes = special_as_text > 0

        prompt_ids = self.encoder.encode(prompt, has_escapes).ids
        ids = self.encoder.encode(prompt + completion, has_escapes).ids
        if ids[: len(prompt_ids)] != prompt_ids:
            ids = prompt_ids + self.encoder.encode(completion, has_escapes).ids
        ids = [*self._beginning, *ids, self._eos_id]

        loss_mask = np.zeros(len(ids), bool)
        loss_mask[len(self._beginning) + len(prompt_ids) :] = True
        loss_mask[:1] = False  # the first token has no context
        turn_end = TurnEnd(
            length=len(ids),
            targets=int(loss_mask.sum()),
            target_bytes=completion_bytes,
            ended=1,
        )
        return TokenSequence(
            ids=np.array(ids, np.int32),
            loss_mask=loss_mask,
            target_bytes=completion_bytes,
            turn_ends=(turn_end,),
        )


def _control_tokens(tokenizer: FastTokenizer) -> dict[int, str]:
    """Return the special tokens and EOS."""
    tokens = {
        id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    tokens.setdefault(int(tokenizer.eos_token_id), str(tokenizer.eos_token))
    return tokens
