"""Python code for the card of a reward model, which scores an answer as training did.

A reward model is trained to score an answer at the token that ends it. Transformers scores the last
token of its input that does not pad. The two differ if the chat template writes a newline after
that token.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_QUESTION = {"role": "user", "content": "What is the capital of France?"}
_ANSWER = {"role": "assistant", "content": "It is Paris."}

_TEXT_CODE = '''

def score(prompt: str, answer: str) -> float:
    """Return the score of an answer to a prompt."""
    inputs = tokenizer(prompt + answer + tokenizer.eos_token, return_tensors="pt")
    return model(input_ids=inputs.input_ids).logits.item()


print(score("What is the capital of France? ", "It is Paris."))
'''

_CHAT_CODE = '''

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


def scoring_code(tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Collection[int]) -> str:
    """Return code that defines ``score``, and calls it with an example.

    It needs the variables ``model`` and ``tokenizer``.

    Args:
        tokenizer: the tokenizer of the model.
        stop_token_ids: the tokens at which an answer ends, besides EOS.

    Returns:
        The code. It is empty if the code would build another text than training did.
    """
    if tokenizer.chat_template is None:
        adds_eos = tokenizer.encode(_ANSWER["content"])[-1] == tokenizer.eos_token_id
        return "" if adds_eos else _TEXT_CODE

    stop_ids = {tokenizer.eos_token_id, *stop_token_ids}
    added_tokens = tokenizer.added_tokens_decoder
    stop_tokens = tuple(added_tokens[id].content for id in stop_ids if id in added_tokens)
    try:
        prompt = str(
            tokenizer.apply_chat_template([_QUESTION], tokenize=False, add_generation_prompt=True)
        )
        text = str(tokenizer.apply_chat_template([_QUESTION, _ANSWER], tokenize=False))
    except Exception:  # a template can raise any error
        return ""

    is_as_trained = text.startswith(prompt) and text.rstrip().endswith(stop_tokens)
    return _CHAT_CODE if is_as_trained else ""
