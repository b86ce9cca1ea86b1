"""Random conversations, of the words that are hard to keep apart from the tokens of a template."""

import random
from typing import Any

from llmtrain.data.formats import Conversation
from tests.data.chats import CALL, CALLING, TOOL

_WORDS = [
    *("yes", "no ", " the answer", "\n", "\n\n", "  ", "question?", "漢字", "🙂", "e\u0301", "\t"),
    *("<|im_end", "</s", "<think>", "</think>", "[/INST]", "assistant\n", "user", "|>", "<", "▁b"),
]


def _random_text(generator: random.Random) -> str:
    text = "".join(generator.choice(_WORDS) for _ in range(generator.randint(1, 8)))
    return text if text.strip() else text + "a"


def _random_message(generator: random.Random, role: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": _random_text(generator)}
    if role == "assistant":
        if generator.random() < 0.2:
            message[generator.choice(["reasoning_content", "thinking"])] = _random_text(generator)
        if generator.random() < 0.1:
            message["content"] = f"<think>\n{_random_text(generator)}\n</think>\n\nso"
        if generator.random() < 0.2:
            message["tool_calls"] = [CALL] * generator.randint(1, 2)
            message["content"] = generator.choice(["", message["content"]])
    return message


def random_conversation(generator: random.Random) -> Conversation:
    """Mostly the user and the assistant in turn; sometimes with calls, or roles in any order."""
    roles = ["system"] if generator.random() < 0.2 else []
    for _ in range(generator.randint(1, 5)):
        roles += ["user", "assistant"]
    if generator.random() < 0.2:
        roles = [generator.choice(["user", "assistant", "tool"]) for _ in roles]

    messages = []
    for role in roles:
        messages.append(_random_message(generator, role))
        if "tool_calls" in messages[-1] and generator.random() < 0.9:
            messages.append(CALLING[2])
            messages.append({"role": "assistant", "content": _random_text(generator)})
    tools = [TOOL] if generator.random() < 0.5 else None
    return Conversation(messages, tools)
