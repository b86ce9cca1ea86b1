"""A ``Modelfile`` for Ollama beside a finished model.

The rules are those of Ollama's ``docs/modelfile.mdx`` and ``convert/`` in August 2026.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llmtrain.errors import UserError
from llmtrain.files import read_object, write_json
from llmtrain.json_types import JsonObject
from llmtrain.model_folders import is_adapter
from llmtrain.models.export import gives_scores, module_class_of
from llmtrain.models.generation import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Text models that Ollama imports from safetensors, by convert/convert.go.
_IMPORTED = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Lfm2ForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
)
# Settings of generation_config.json, and what Ollama calls them.
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
# The context of a Modelfile. A longer one needs more memory, and the user can raise it.
_LONGEST_CONTEXT = 8192

_Turn: TypeAlias = tuple[str, str]  # its role, and its content

_SYSTEM: _Turn = ("system", "<a rule>")
_QUESTION: _Turn = ("user", "<a question>")
_ANSWER: _Turn = ("assistant", "<an answer>")
_NEXT_QUESTION: _Turn = ("user", "<another question>")
# Some templates leave out the reasoning of earlier answers.
_REASONED: _Turn = ("assistant", "<think>\na thought\n</think>\n\n<another answer>")
_LAST_QUESTION: _Turn = ("user", "<the last question>")


@dataclass(frozen=True)
class TurnFormat:
    """A chat template that writes each turn in the same way, whatever the others are.

    Attributes:
        beginning: the text before the first turn.
        prefixes: the text before the content of a turn, by its role.
        suffixes: the text after the content of a turn, by its role.
        prompt: the text that asks for an answer.
    """

    beginning: str
    prefixes: dict[str, str]
    suffixes: dict[str, str]
    prompt: str

    def render(self, chat: list[_Turn]) -> str:
        """Return the prompt for the next answer of a chat."""
        turns = [self.prefixes[role] + content + self.suffixes[role] for role, content in chat]
        return "".join([self.beginning, *turns, self.prompt])

    def go_template(self) -> str:
        """Return the template in Go's syntax. It leaves out turns of other roles."""
        branches = []
        for role, prefix in self.prefixes.items():
            turn = prefix + "{{ .Content }}" + self.suffixes[role]
            branches.append(f'if eq .Role "{role}" }}}}{turn}{{{{ ')
        turns = "{{ range .Messages }}{{ " + "else ".join(branches) + "end }}{{ end }}"
        return self.beginning + turns + self.prompt


def turn_format(tokenizer: "PreTrainedTokenizerFast") -> TurnFormat | None:
    """Find the turns of a chat template by rendering short chats.

    Returns:
        ``None`` if the template writes a turn in several ways, or a text that Go would not take as
        it is.
    """

    def render(*chat: _Turn, prompt: bool = False) -> str:
        messages = [{"role": role, "content": content} for role, content in chat]
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        )

    try:
        turns = _find_turns(render)
        chats = [
            [_QUESTION],
            [_QUESTION, _ANSWER, _NEXT_QUESTION, _REASONED, _LAST_QUESTION],
        ]
        if "system" in turns.prefixes:
            chats += [[_SYSTEM, *chat] for chat in chats]
        is_right = all(render(*chat, prompt=True) == turns.render(chat) for chat in chats)
    except Exception:  # templates raise all kinds of errors
        return None

    texts = turns.render([(role, "") for role in turns.prefixes])
    is_plain = not any(mark in texts for mark in ("{{", "}}", '"""'))
    return turns if is_right and is_plain else None


def _find_turns(render: Callable[..., str]) -> TurnFormat:
    """Return the turns of a template, if they are the same everywhere.

    Raises:
        ValueError: if the chats show that they are not.
    """
    asked = render(_QUESTION)
    answered = render(_QUESTION, _ANSWER)
    asked_again = render(_QUESTION, _ANSWER, _NEXT_QUESTION)

    before_question, after_question = _around(asked, _QUESTION)
    _, answer = _around(answered, _QUESTION)
    before_answer, after_answer = _around(answer, _ANSWER)
    _, next_turn = _around(asked_again, _ANSWER)
    between, _ = _around(next_turn, _NEXT_QUESTION)

    before_user = _without_prefix(between, after_answer)
    beginning = _without_suffix(before_question, before_user)
    prefixes = {"user": before_user, "assistant": _without_prefix(before_answer, after_question)}
    suffixes = {"user": after_question, "assistant": after_answer}

    try:
        ruled = render(_SYSTEM, _QUESTION)
    except Exception:  # the template refuses system messages
        ruled = ""
    if ruled:
        before_rule, after_rule = _around(ruled, _SYSTEM)
        between, _ = _around(after_rule, _QUESTION)
        prefixes["system"] = _without_prefix(before_rule, beginning)
        suffixes["system"] = _without_suffix(between, before_user)

    return TurnFormat(
        beginning=beginning,
        prefixes=prefixes,
        suffixes=suffixes,
        prompt=_without_prefix(render(_QUESTION, prompt=True), asked),
    )


def _around(text: str, turn: _Turn) -> tuple[str, str]:
    """Return what is before and after the content of a turn."""
    before, content, after = text.partition(turn[1])
    if not content:
        raise ValueError(f"{turn[1]} is not shown")
    return before, after


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise ValueError(f"{text!r} does not begin with {prefix!r}")
    return text.removeprefix(prefix)


def _without_suffix(text: str, suffix: str) -> str:
    if not text.endswith(suffix):
        raise ValueError(f"{text!r} does not end with {suffix!r}")
    return text.removesuffix(suffix)


def write_modelfile(folder: Path) -> list[str]:
    """Write a ``Modelfile`` into the folder of a model, and prepare it for ``ollama create``.

    Args:
        folder: the folder, whose configuration may get further settings.

    Returns:
        Notes for the user.

    Raises:
        UserError: if the folder holds no model that writes text.
    """
    if is_adapter(folder):
        raise UserError("--ollama needs a whole model, and this is an adapter; add --merge.")
    config = read_object(folder / "config.json")
    if gives_scores(config) or module_class_of(config):
        raise UserError("--ollama is for models that write text; leave it out.")
    tokenizer = tokenizer_of(str(folder))
    generation = read_object(folder / "generation_config.json")
    notes = []

    problem = _import_problem(config)
    if problem is None:
        lines = ["FROM ."]
        write_json(folder / "config.json", _with_older_names(config), durable=False)
    else:
        lines = ["FROM ./model.gguf"]
        notes.append(
            f"Ollama cannot import this model from safetensors, because {problem}: convert it to "
            "GGUF, and put the file beside the Modelfile as model.gguf"
        )

    template, note = _template(tokenizer)
    if template:
        lines.append(f'TEMPLATE """{template}"""')
    if note:
        notes.append(note)
    _prepare_tokenizer(folder, tokenizer, has_template=bool(template))

    for token_id in sorted(_stop_token_ids(tokenizer, generation)):
        lines.append(f'PARAMETER stop "{tokenizer.decode([token_id])}"')
    text_config = config.get("text_config", config)
    positions = text_config.get("max_position_embeddings") or text_config.get("n_positions")
    if positions:
        lines.append(f"PARAMETER num_ctx {min(positions, _LONGEST_CONTEXT)}")
    for key, parameter in _SAMPLING.items():
        if generation.get(key) is not None:
            lines.append(f"PARAMETER {parameter} {generation[key]}")

    (folder / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return notes


def _import_problem(config: JsonObject) -> str | None:
    """Return why Ollama cannot import a model from safetensors; ``None`` if it can."""
    (architecture,) = config["architectures"]
    if architecture not in _IMPORTED:
        return f"it does not know {architecture}"
    if architecture == "Lfm2ForCausalLM" and not config.get("tie_word_embeddings", True):
        return "it knows LFM2 only with a head that is tied to the embeddings"
    known_types = ("default", "llama3") if architecture == "LlamaForCausalLM" else ("default",)
    for rope in _rotary_positions(config).values():
        is_partial = rope.get("partial_rotary_factor", 1.0) != 1.0
        if is_partial or rope.get("rope_type", "default") not in known_types:
            return "it does not read how this one scales rotary positions"
    return None


def _rotary_positions(config: JsonObject) -> dict[str, JsonObject]:
    """Return the settings of rotary positions by the type of the layers."""
    rope = config.get("rope_parameters") or {}
    return {"full_attention": rope} if "rope_theta" in rope else rope


def _with_older_names(config: JsonObject) -> JsonObject:
    """Return ``config.json`` with the rotary positions under the names that Ollama reads.

    transformers 5 writes ``rope_parameters``. It reads the older names, too.
    """
    config = dict(config)
    for layer_type, rope in _rotary_positions(config).items():
        is_sliding = layer_type == "sliding_attention"
        config["rope_local_base_freq" if is_sliding else "rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
    return config


def _template(tokenizer: "PreTrainedTokenizerFast") -> tuple[str, str]:
    """Return the chat template in Go's syntax, and a note; each may be empty."""
    if tokenizer.chat_template is None:
        return "", ""
    turns = turn_format(tokenizer)
    if turns is None:
        return "", (
            "the Modelfile has no TEMPLATE, because the chat template is more than one turn after "
            "the other; an Ollama that renders Jinja templates uses the template itself"
        )

    note = ""
    if "system" not in turns.prefixes:
        note = "the chat template has no system messages, so Ollama leaves them out"
    template = turns.go_template()
    if _adds_bos(tokenizer):
        template = template.removeprefix(str(tokenizer.bos_token))
    return template, note


def _adds_bos(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return whether a tokenizer puts BOS before every text. Ollama then does so, too."""
    has_bos = tokenizer.bos_token_id is not None
    return has_bos and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]


def _prepare_tokenizer(
    folder: Path, tokenizer: "PreTrainedTokenizerFast", has_template: bool
) -> None:
    """Write what Ollama reads in ``tokenizer_config.json`` alone."""
    path = folder / "tokenizer_config.json"
    settings = read_object(path)
    if _adds_bos(tokenizer):
        settings["add_bos_token"] = True
    if tokenizer.chat_template is not None and not has_template:
        settings["chat_template"] = tokenizer.chat_template
    write_json(path, settings, durable=False)


def _stop_token_ids(tokenizer: "PreTrainedTokenizerFast", generation: JsonObject) -> set[int]:
    """Return the tokens at which an answer ends."""
    stops = generation.get("eos_token_id")
    stop_token_ids = set(stops) if isinstance(stops, list) else {stops}
    return {*stop_token_ids, tokenizer.eos_token_id} - {None}
