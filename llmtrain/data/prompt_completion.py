"""Encode prompts and completions that are plain text, for models without a chat template."""

from collections import Counter

import numpy as np

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.rendered import Rendered, TokenSequence, TurnEnd
from llmtrain.data.text_encoder import TextEncoder
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos, control_tokens_of


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
        self.encoder = TextEncoder(tokenizer, control_tokens_of(tokenizer))
        self._beginning: list[int] = []
        if begins_with_bos(tokenizer):
            self._beginning = [int(tokenizer.bos_token_id)]

    def __reduce__(self) -> tuple[type["PromptCompletionRenderer"], tuple[FastTokenizer]]:
        return PromptCompletionRenderer, (self.tokenizer,)

    @property
    def stop_token_ids(self) -> set[int]:
        """The token at which a completion ends."""
        return {int(self.tokenizer.eos_token_id)}

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
        eos = str(self.tokenizer.eos_token)
        completions = [completion.removesuffix(eos) for completion in completions]
        sequences = [self._sequence(prompt, completion) for completion in completions]
        # The prompt, which is in all sequences, is counted once.
        _, special_as_text = self.encoder.escaping.escape([prompt, *completions])
        return Rendered(
            sequences, counts=Counter(special_as_text=special_as_text), unread_fields=Counter()
        )

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, after which a completion is trained.

        Raises:
            BadRecord: if the text cannot be used.
        """
        (escaped,), has_escapes = self._escaped(text)
        return [*self._beginning, *self.encoder.encode(escaped, has_escapes).ids]

    def _escaped(self, *texts: str) -> tuple[list[str], bool]:
        """Return texts whose special tokens are escaped, and whether they have any."""
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise BadRecord(
                "the record holds half of a surrogate pair, which is not valid text"
            ) from None
        escaped, special_as_text = self.encoder.escaping.escape([*texts])
        return escaped, special_as_text > 0

    def _sequence(self, prompt: str, completion: str) -> TokenSequence:
        """Encode a prompt and its completion.

        If the last characters of the prompt and the first of the completion became one token, the
        completion is encoded without the prompt: a model that completes begins with a new token.
        """
        prompt_ids = self.prompt(prompt)
        (escaped_prompt, escaped_completion), has_escapes = self._escaped(prompt, completion)
        text_ids = self.encoder.encode(escaped_prompt + escaped_completion, has_escapes).ids
        ids = [*self._beginning, *text_ids]
        if ids[: len(prompt_ids)] != prompt_ids:
            ids = prompt_ids + self.encoder.encode(escaped_completion, has_escapes).ids
        ids.append(int(self.tokenizer.eos_token_id))

        completion_bytes = len(completion.encode())
        loss_mask = np.zeros(len(ids), bool)
        loss_mask[len(prompt_ids) :] = True
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
