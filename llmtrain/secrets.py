"""Passwords and tokens, which must not leave this process: known by their names, their shapes, the environment."""

import os
import re
from typing import Any, TypeVar

T = TypeVar("T")

HIDDEN = "***"
_ORDINARY = "bos|eos|pad|unk|sep|cls|mask|image|start|end|stop|next|per|special"  # tokens of a text
_NAME = (
    rf"(?!(?:[\w.-]*[_.-])?(?:{_ORDINARY})[_.-]token\b)(?:[\w.-]*[_.-])?"
    r"(?:token|secret|passwd|password|credentials?|(?:api|access|secret|private)[_-]?key)"
)
_KEY = (
    r"(?:[\w.-]*[_.-])?key"  # says too little: may be a column; with 40 hex digits it is a W&B key
)
_HEX = r"[0-9a-fA-F]{40}"
_QUOTED = r"\"[^\"]*\"|'[^']*'"

_SECRET_NAME = re.compile(rf"-{{0,2}}{_NAME}", re.IGNORECASE)
_KEY_NAME = re.compile(rf"-{{0,2}}{_KEY}", re.IGNORECASE)
_HEX_KEY = re.compile(rf"\b{_HEX}\b")
_NAMED = re.compile(  # name=value, --name value, "name": "value"
    rf"(?<![\w.-])(-{{0,2}}{_NAME}=|--{_NAME}\s+(?!-))(?:{_QUOTED}|\S+)"
    rf"|(?<![\w.-])(-{{0,2}}{_KEY}=|--{_KEY}\s+)[\"']?{_HEX}\b"
    rf"|([\"']{_NAME}[\"']\s*:\s*)(?:{_QUOTED})",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"(?<=://)[^\s/?#]+(?=@)"  # scheme://user:password@host
    r"|(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"  # GitHub
    r"|sk-(?=[\w-]*[A-Z0-9])[\w-]{16,}"  # OpenAI, Anthropic
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|wandb_v\d+_\w{16,})"  # W&B, beside its keys of 40 hex digits
)


def redacted(value: T, name: str = "") -> T:
    """Return the value with ``***`` for every secret in it; of lists, tuples and dictionaries a copy of their type.

    A secret is a URL's user part, a token of a well-known shape, the value of an environment variable whose name ends
    in ``_TOKEN``, ``_KEY``, ``_SECRET`` or ``_PASSWORD``, or what stands under such a name: ``{"api_key": ...}``,
    ``["--hub_token", ...]``, ``"password=..."``, or ``name``, where the value has one. Numbers are kept.
    """
    found = {
        v
        for k, v in os.environ.items()
        if re.search("_(TOKEN|KEY|SECRET|PASSWORD)$", k.upper()) and len(v) >= 8
    }
    given = re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))) or "(?!)")
    hidden: T = _redacted(value, given, name)
    return hidden


def _redacted(value: Any, given: re.Pattern[str], name: str) -> Any:
    """Redact a value that stands under ``name``; ``given`` are secrets word for word."""

    def under(key: object, value: object) -> object:
        secret = _SECRET_NAME.fullmatch(name) or not isinstance(key, str)
        return _redacted(value, given, name if secret else str(key))

    if isinstance(value, dict):
        return type(value)({_text(key, given): under(key, one) for key, one in value.items()})
    if isinstance(value, list | tuple):  # in a command line a flag names what comes next
        flags = [
            "",
            *(one if isinstance(one, str) and one.startswith("--") else "" for one in value),
        ]
        names = (
            flag if flag and not str(one).startswith("-") else name
            for flag, one in zip(flags, value, strict=False)
        )
        return type(value)([under(key, one) for key, one in zip(names, value, strict=True)])
    if isinstance(value, str) and value and _SECRET_NAME.fullmatch(name):
        return HIDDEN
    if isinstance(value, str) and _KEY_NAME.fullmatch(name):
        value = _HEX_KEY.sub(HIDDEN, value)
    return _text(value, given)


def _text(value: object, given: re.Pattern[str]) -> object:
    if not isinstance(value, str):
        return value
    value = given.sub(HIDDEN, value)
    value = _NAMED.sub(lambda match: f"{match[1] or match[2] or match[3]}{HIDDEN}", value)
    return _SHAPES.sub(HIDDEN, value)
