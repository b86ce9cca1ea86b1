"""Reward models: which families there are, how their texts are padded, and code that scores."""

import copy
import functools
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from llmtrain.console import note
from llmtrain.errors import UserError
from llmtrain.model_folders import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_RESERVED = re.compile("reserved|unused|place.?holder", re.IGNORECASE)

_OTHER_FAMILY = (
    "use a model of another family, such as llama, qwen3 or gpt2 "
    "(recipes/gpt.py --architecture gpt2)"
)

_SCORING_CODE = '''

def score(messages: list[dict[str, str]]) -> float:
    """Return the score of the last message, an answer to the messages before it."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    text = text.rstrip()  # ends with the token that ends the answer
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    return model(input_ids=inputs.input_ids).logits.item()


question = {"role": "user", "content": "What is the capital of France?"}
answer = {"role": "assistant", "content": "It is Paris."}
print(score([question, answer]))
'''


def check_reward_family(config_class: "type[PreTrainedConfig]") -> None:
    """Check that transformers has a class for sequence classification in a family.

    Args:
        config_class: the class of the family's configurations.

    Raises:
        UserError: if it has none.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if config_class not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            "--loss_type reward: transformers has no sequence classification class for "
            f"{config_class.model_type}; {_OTHER_FAMILY}."
        )


def check_score_head(model: "PreTrainedModel") -> None:
    """Check that a model for sequence classification scores every token, with a head ``score``.

    Raises:
        UserError: if it does not.
    """
    if not hasattr(model, "score"):
        raise UserError(
            f"--loss_type reward: {type(model).__name__} has no head named score; {_OTHER_FAMILY}."
        )


def with_padding_token(
    tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Collection[int], vocabulary: int
) -> "PreTrainedTokenizerFast":
    """Return a copy of a tokenizer whose padding token ends no answer.

    Transformers scores the last token of a text that is not the padding token. It is the
    tokenizer's own one, the unknown token, a reserved token, or the next row of the embedding, if
    no token has that. If there is no such token, the copy has no padding token, and transformers
    refuses to score several texts at once.

    Args:
        tokenizer: the tokenizer.
        stop_token_ids: the tokens at which an answer ends, besides EOS.
        vocabulary: the number of rows of the embedding.
    """
    added_tokens = sorted(tokenizer.added_tokens_decoder.items())
    reserved = [token_id for token_id, token in added_tokens if _RESERVED.search(token.content)]
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, *reserved]
    unusable = {None, tokenizer.eos_token_id, *stop_token_ids}
    usable = [token_id for token_id in candidates if token_id not in unusable]

    padded = copy.deepcopy(tokenizer)
    if usable:
        padded.pad_token = tokenizer.convert_ids_to_tokens(usable[0])
    elif vocabulary_of(tokenizer) < vocabulary:
        padded.add_special_tokens({"pad_token": "<|pad|>"})
    else:
        padded.pad_token = None
        note(
            "this tokenizer has no token to pad texts with that ends no answer, so transformers "
            "can only score one answer at a time with the finished model"
        )
    return padded


def scoring_code(tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Collection[int]) -> str:
    """Return code for the model card that scores an answer as training did.

    A reward model is trained to score an answer at the token that ends it. Transformers scores the
    last token of its input that does not pad. The two differ if the chat template writes a newline
    after that token.

    Args:
        tokenizer: the tokenizer of the model.
        stop_token_ids: the tokens at which an answer ends, besides EOS.

    Returns:
        Code that uses the variables ``model`` and ``tokenizer``. It is empty if there is no chat
        template, or if the code would build another text than training did.
    """
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = {"role": "assistant", "content": "It is Paris."}
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        prompt = str(render([question], add_generation_prompt=True))
        text = str(render([question, answer]))
    except Exception:  # a template can raise any error, and there may be none
        return ""

    stop_ids = {tokenizer.eos_token_id, *stop_token_ids}
    added_tokens = tokenizer.added_tokens_decoder
    stop_tokens = tuple(added_tokens[id].content for id in stop_ids if id in added_tokens)
    is_as_trained = text.startswith(prompt) and text.rstrip().endswith(stop_tokens)
    return _SCORING_CODE if is_as_trained else ""
