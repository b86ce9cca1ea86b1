"""Hides passwords and tokens, known by name, by shape, or from environment variables."""

import os
import re
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

HIDDEN = "***"

# In tokenizers and models, names such as `eos_token` and `next_token` are no secrets. PWD is the
# working directory of a shell.
_ORDINARY = "bos|eos|pad|unk|sep|cls|mask|image|video|audio|start|end|stop|next|per|special"
# What comes before the last words of a name: all up to a _, a . or a -, or up to a capital letter.
_PREFIX = r"[\w.-]*(?:[_.-]|(?-i:(?<=[a-z0-9])(?=[A-Z])))"
_NO_SECRET = rf"(?!(?:{_PREFIX})?(?:{_ORDINARY})[_.-]?token\b|(?-i:PWD\b))"
_PASSWORD = (
    rf"(?:[\w.-]*passw(?:or)?d|(?:{_PREFIX})?(?:pwd|passphrase|"
    r"(?:api|access|account|secret|private)[_-]?key)|(?-i:(?:[A-Z0-9_]+_)?PAT|[A-Z0-9_]+_PASS))"
)
_TOKEN = "(?:token|secret|credentials?)"
_NAME = rf"{_NO_SECRET}(?:{_PASSWORD}|(?:{_PREFIX})?{_TOKEN})"
# In prose, a word such as `token` may come before a colon: only with a prefix it is a name.
_NAME_IN_PROSE = rf"{_NO_SECRET}(?:{_PASSWORD}|{_PREFIX}{_TOKEN})"
# A name that ends in `key` may be a column of a table. It is a secret only with 40 hex digits,
# which is the shape of a W&B key, or as the name of an environment variable.
_KEY = r"(?:[\w.-]*[_.-])?key"
_HEX = r"[0-9a-fA-F]{40}"
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"

_SECRET_NAME = re.compile(rf"-{{0,2}}{_NAME}", re.IGNORECASE)
_KEY_NAME = re.compile(rf"-{{0,2}}{_KEY}", re.IGNORECASE)
_HEX_KEY = re.compile(rf"\b{_HEX}\b")
# A name and its value within a text: name=value, --name value, "name": "value", name: value. The
# groups keep the part before the value.
_NAMED = re.compile(
    rf"(?<![\w.-])(-{{0,2}}{_NAME}=(?!=)|--{_NAME}\s+(?!-)|{_NAME_IN_PROSE}[ \t]*[:=][ \t]*(?!=))"
    rf"(?:{_QUOTED}|\S+)"
    rf"|(?<![\w.-])(-{{0,2}}{_KEY}=|--{_KEY}\s+)[\"']?{_HEX}\b"
    rf"|([\"']{_NAME}[\"']\s*:\s*)(?:{_QUOTED})"
    r"|\b(authorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token)\s+)?)[^\s\"']+"
    r"|\b(bearer\s+)(?:(?=[^\s\d]*\d)[^\s\"']{8,}|[^\s\"']{16,})"
    r"|(?<![\w.-])((?:[\w-]+-)?sig(?:nature)?=)[^\s&\"']+",  # signed URLs, as of Azure and S3
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"(?<=://)[^\s/?#]+(?=@)"  # scheme://user:password@host
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"  # GitHub
    r"|gl(?:pat|ptt|cbt|dt|rt|ft|soat)-[\w-]{16,}"  # GitLab
    r"|xox[a-z]-[\w-]{10,}|xapp-[\w-]{16,}"  # Slack
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}"  # Google
    r"|eyJ[\w-]{8,}\.[\w-]{8,}[\w.-]*"  # JSON web tokens
    r"|sk-(?=[\w-]*[A-Z0-9])[\w-]{16,}"  # OpenAI, Anthropic
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|nvapi-[\w-]{16,}"  # NVIDIA
    r"|(?:pypi-|npm_)\w[\w-]{15,}"  # PyPI, npm
    r"|wandb_v\d+_\w{16,})"  # W&B, which also has keys of 40 hex digits
)
_SHORTEST_SECRET = 8  # characters; a shorter value of a variable may be an ordinary word


def redacted(value: T, name: str = "") -> T:
    """Return a copy of a value with ``***`` in place of every secret in it.

    These are secrets:

    - the user part of a URL,
    - a token of a well-known shape, a private key, and the signature in a signed URL,
    - what follows ``Bearer`` or ``Authorization:``,
    - the value of an environment variable whose name ends in a word such as ``TOKEN``, ``KEY``,
      ``SECRET``, ``PASSWORD``, ``PWD``, ``PAT`` or ``CREDENTIALS``, unless it is a path,
    - a value under a name that ends in such a word, except ``KEY``: ``{"api_key": ...}``,
      ``["--hub_token", ...]``, ``"password=..."`` or ``"password: ..."``.

    Args:
        value: a string, or lists, tuples and dictionaries with strings in them, which keep their
            types. Anything else is returned unchanged, numbers for example.
        name: the name of the value, if it has one.
    """
    hidden: T = _redacted(value, _environment_secrets(), name)
    return hidden


def _environment_secrets() -> re.Pattern[str]:
    """Return a pattern for the secrets in environment variables."""
    secrets = set()
    for name, value in os.environ.items():
        is_secret = _SECRET_NAME.fullmatch(name) or _KEY_NAME.fullmatch(name)
        if is_secret and len(value) >= _SHORTEST_SECRET:
            # GOOGLE_APPLICATION_CREDENTIALS is the path of a file.
            top_folder = re.match(r"/[^/]+(?=/)", value)
            if top_folder is None or not Path(top_folder[0]).is_dir():
                secrets.add(value)
    # The longest first: a secret may contain another one.
    longest_first = sorted(secrets, key=len, reverse=True)
    pattern = "|".join(re.escape(secret) for secret in longest_first)
    return re.compile(pattern or "(?!)")  # which matches nothing


def _redacted(value: Any, environment_secrets: re.Pattern[str], name: str) -> Any:
    """Redact a value that has a name, which may be empty."""
    is_secret = _SECRET_NAME.fullmatch(name) is not None

    if isinstance(value, dict):
        pairs = {}
        for key, item in value.items():
            # Everything inside a secret is a secret, whatever its own name.
            item_name = name if is_secret or not isinstance(key, str) else key
            redacted_key = _redacted_text(key, environment_secrets)
            pairs[redacted_key] = _redacted(item, environment_secrets, item_name)
        return type(value)(pairs)

    if isinstance(value, list | tuple):
        items = []
        flag = ""  # the item before, if it is a flag
        for item in value:
            # In a command line, a flag is the name of the word after it: ["--hub_token", "..."].
            is_value_of_flag = flag != "" and not str(item).startswith("-")
            item_name = flag if is_value_of_flag and not is_secret else name
            items.append(_redacted(item, environment_secrets, item_name))
            flag = item if isinstance(item, str) and item.startswith("--") else ""
        return type(value)(items)

    if isinstance(value, str) and value and is_secret:
        return HIDDEN
    if isinstance(value, str) and _KEY_NAME.fullmatch(name):
        value = _HEX_KEY.sub(HIDDEN, value)
    return _redacted_text(value, environment_secrets)


def _redacted_text(value: object, environment_secrets: re.Pattern[str]) -> object:
    """Redact the secrets inside a text. Return any other value unchanged."""
    if not isinstance(value, str):
        return value
    text = environment_secrets.sub(HIDDEN, value)
    text = _NAMED.sub(lambda match: "".join(filter(None, match.groups())) + HIDDEN, text)
    return _SHAPES.sub(HIDDEN, text)
