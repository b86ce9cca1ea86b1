"""Make the prompts of ``llmtrain generate``, ``llmtrain chat`` and samples, as training makes them.

Training and use share the functions that make prompts: :meth:`Renderer.prompt` and
:meth:`PromptCompletionRenderer.prompt`.
"""

from collections.abc import Collection

from llmtrain.data.chat_template import REASONING_OPTION
from llmtrain.data.messages import Message
from llmtrain.data.readers import Fields
from llmtrain.data.render import PromptCompletionRenderer, Renderer
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import UserError, as_user_error, first_line


class Prompts:
    """Makes the tokens of prompts, with the functions that make them for training.

    Args:
        tokenizer: the tokenizer of the model.
        stop_token_ids: the tokens at which the model stops generating.
        thinking: ask for answers with or without reasoning, if the chat template can. ``None``:
            as ``tokenizer_config.json`` says that the model was trained. If it does not say so,
            the template decides.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        stop_token_ids: Collection[int] = (),
        thinking: bool | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._renderer: Renderer | None = None
        self._plain_text = PromptCompletionRenderer(tokenizer)
        self._thinking = thinking
        if thinking is None:
            self._thinking = tokenizer.init_kwargs.get(REASONING_OPTION)

    def chat_renderer(self) -> Renderer:
        """Return the renderer of conversations. It analyses the chat template once.

        Raises:
            UserError: if the tokenizer has no chat template, or one that cannot be used.
        """
        if self._tokenizer.chat_template is None:
            raise UserError(
                "this model has no chat template: it can only continue text; use llmtrain generate."
            )
        if self._renderer is None:
            with as_user_error("the chat template", describe=first_line):
                self._renderer = Renderer(self._tokenizer, self._stop_token_ids)
        return self._renderer

    def of_text(self, text: str) -> list[int]:
        """Return the tokens of a text to continue; for no text, the one that begins a text.

        Raises:
            BadRecord: if the text cannot be used.
            UserError: if there is no text, and the tokenizer has no token to begin one.
        """
        ids = self._plain_text.prompt(text)
        if ids:
            return ids
        # If the tokenizer puts no BOS before a text, a document is trained after EOS.
        for token in (self._tokenizer.eos_token_id, self._tokenizer.bos_token_id):
            if token is not None:
                return [int(token)]
        raise UserError(
            "this model's tokenizer has no token to begin a text with; give a --prompt."
        )

    def of_messages(self, messages: list[Message], tools: list[Fields] | None = None) -> list[int]:
        """Return the tokens of a conversation, up to the beginning of the next answer.

        Raises:
            BadRecord: if the chat template refuses the conversation, or its text cannot be used.
            UserError: if there is no chat template.
        """
        return self.chat_renderer().prompt(messages, tools, self._thinking)

    def of_question(self, text: str) -> list[int]:
        """Return the tokens of a question if there is a chat template, or of a text to continue."""
        if self._tokenizer.chat_template is None:
            return self.of_text(text)
        return self.of_messages([{"role": "user", "content": text}])
