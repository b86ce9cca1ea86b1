"""Conversations and preference records as tokens with a loss mask."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from llmtrain.data.text_encoder import TextEncoder

# The counts of trained turns whose prompt asks for reasoning, for none, or leaves that to the
# template. If a template cannot be asked, there are no such counts.
THINKING_COUNTS = {
    True: "thinking_turns",
    False: "no_thinking_turns",
    None: "unset_thinking_turns",
}


class TurnEnd(NamedTuple):
    """The part of a token sequence up to the end of one of its assistant turns.

    Attributes:
        length: the number of tokens.
        targets: the number of targets.
        target_bytes: UTF-8 bytes of the targets' text, without control tokens.
        ended: the number of turns whose last target token ends a turn.
    """

    length: int
    targets: int
    target_bytes: int
    ended: int


class TokenSequence(NamedTuple):
    """Tokens that are trained on together.

    Attributes:
        ids: int32 [n].
        loss_mask: bool [n], whether a token is a target.
        target_bytes: UTF-8 bytes of the targets' text, without control tokens.
        turn_ends: the end of each assistant turn that is a target. The last one is the end of the
            sequence.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    target_bytes: int
    turn_ends: tuple[TurnEnd, ...] = ()

    @property
    def turns(self) -> int:
        """The number of assistant turns that are targets."""
        return len(self.turn_ends)

    @property
    def ended(self) -> int:
        """The number of these whose last target token ends a turn."""
        return self.turn_ends[-1].ended if self.turn_ends else 0


class Rendered(NamedTuple):
    """A conversation or a preference record as token sequences.

    Attributes:
        sequences: the token sequences. Each assistant turn of a conversation is a target in one of
            them; each answer of a preference record has its own.
        counts: what happened to its turns and messages:

            - ``mismatched_answers``: answers that are in no sequence, because the template shows
              them differently from the way it prompts for them.
            - ``mismatched_calls``: the same for turns that end with a call.
            - ``hidden_turns``: turns whose reasoning, or whose text next to a call, the template
              does not show.
            - ``unmarked_turns``: turns that are trained in full, because their prompt does not
              lead to the text in ``{% generation %}`` blocks.
            - ``unweighted_turns``: turns that are not trained, because their weight is 0.
            - ``special_as_text``: special tokens in messages that are encoded as text.
            - :data:`THINKING_COUNTS`: turns by the setting with which they are prompted for.
        unread_fields: the number of messages that have each field that is not read here.
    """

    sequences: list[TokenSequence]
    counts: Counter[str]
    unread_fields: Counter[str]


def cut(sequence: TokenSequence, width: int, encoder: TextEncoder) -> TokenSequence:
    """Return the first ``width`` tokens of a sequence.

    The result has no ``turn_ends``, so its turns count neither as turns nor as ended.
    """
    ids = sequence.ids[:width]
    loss_mask = sequence.loss_mask[:width]
    target_ids = ids[loss_mask & ~encoder.are_controls(ids)].tolist()
    text = encoder.backend.decode(target_ids, skip_special_tokens=False)
    return TokenSequence(ids, loss_mask, target_bytes=len(text.encode()))
