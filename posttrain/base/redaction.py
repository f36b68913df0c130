"""Hides secrets in whatever is written or printed: by the names and values of variables, settings and addresses."""

import functools
import os
import re
from typing import Any

HIDDEN = "***"
# Words in a variable's name (`GITHUB_PAT`, `PGPASSWORD`, `my-api-key`) that mark its value as a secret. PATH_WORDS are
# the last words of names whose values are paths.
SECRET_WORD = re.compile(
    r"[a-z0-9]*(?:token|secret|password|passwd|passphrase|credential|apikey)s?"
    r"|keys?|pat|pass|sshpass|pwd|auth|authorization|creds?|cookies?|jwt|bearer|dsn",
    re.IGNORECASE,
)
# Ambiguous words: the value is a secret unless it is a plain word (SORT_KEY=created_at).
WEAK_WORD = re.compile(r"keys?|pat|pass|pwd|auth|cookies?|bearer", re.IGNORECASE)
PLAIN_WORD = re.compile(r"[a-z]+(?:[_.-][a-z]+)*")
TOKEN_OF_TEXT = re.compile(
    r"(?:^|[._-])(?:stop|eos|bos|pad|padding|unk|unknown|sep|separator|mask|\w*new|max|start|begin|end|eot|turn|cls|class"
    r"|special|added|image|audio|video|vision|think|prefix|suffix)[_-]tokens?$",
    re.IGNORECASE,
)
# Names of keys for sorting, grouping or lookup, whose values are names of columns and the like.
KEY_OF_DATA = re.compile(
    r"(?:^|[._-])(?:sort|order|group|join|index|primary|foreign|cache|row|column|field|data|dict|text|label|image|input|output"
    r"|target|prompt|completion|question|answer|response|solution|message|content|missing|unexpected|ignore)s?[_-]keys?$",
    re.IGNORECASE,
)
AMBIGUOUS = re.compile(r"(?:.*\.)?(?:keys?|token)", re.IGNORECASE)  # names of secrets or of such keys
CASED = r"(?:[A-Z]?[a-z]+(?:[A-Z][a-z]{2,})*|[A-Z]+)"
ORDINARY = re.compile(rf".{{0,5}}|{CASED}(?:[_.-]{CASED})*")  # a part of a text that is not a credential
COLUMN = re.compile(rf"{ORDINARY.pattern}|{CASED}_?\d{{1,2}}")
PATH_WORDS = ("PATH", "DIR", "DIRECTORY", "FILE", "HOME", "SOCK")
LEAST_CHARACTERS = 8  # minimum length of a secret in the environment; shorter values may be ordinary words
# Values that look like secrets. The named groups match the part before the secret, which is kept.
SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl[a-z]{2,5}-[\w-]{20,}"
    r"|(?:sk|nvapi|xai|pplx|tskey|pypi)-[\w-]{20,}|(?:gsk|r8|npm|dop_v1|lin_api|wandb_v1|shpat|whsec)_\w{20,}"
    r"|[sr]k_(?:live|test)_\w{10,}|A[KS]IA[0-9A-Z]{16}|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{10,}|AIza[\w-]{35}"
    r"|ya29\.[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|dapi[0-9a-f]{32}|AGE-SECRET-KEY-1\w{20,}|ATATT3x[\w=-]{20,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?P<address>://)(?:[^/\s:@]*:[^/\s@]+|(?![a-z][a-z_-]{0,15}@)[^/\s:@?#]+)(?=@)"  # user:password, or a token
    r"|(?P<query>[?&][\w.-]*(?i:token|key|keyid|secret|password|passwd|signature|sig|credential|auth|jwt)=)[^&#\s\"']+"
    r"|(?P<header>(?i:\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?)|\bBearer\s+(?=\S{16}))"
    r"(?!\*\*\*)[^\s\"',}]+"
)
# A name with its value in a string: settings, JSON, headers, arguments such as {password: x}. Matches begin only at the
# start of a word, so that a long word takes linear time.
PAIR = re.compile(
    r"(?<![\w.-])(?P<lead>(?:[.-]|[^\WA-Za-z])*+)(?P<name>[A-Za-z][\w.-]*+)(?P<between>[\"']?\s*[:=]\s*)"
    r"(?:(?P<quote>[\"'])(?P<quoted>[^\"'\n]+)(?P=quote)|[\"']?(?P<value>[^\s\"',;{}\[\]&<>()|]{4,}))"
)
COMMON = ("key", "keys", "pass", "pat", "bearer")  # ordinary words in messages
STRONG_NAME = re.compile(r"(?:api|access|secret|private|signing)[_.-]?keys?$", re.IGNORECASE)
NO_SECRET = re.compile(r"\$\{?[\w.]+\}?|[\d.,]+[a-zA-Z%]?|null|none|true|false|[<\[].*|\*\*\*", re.IGNORECASE)


def redact(data: Any) -> Any:
    """A copy of a string, or of nested dicts and lists of strings, with secrets replaced by `***`.

    Secrets are the values (8 characters or more) of environment variables with names such as HF_TOKEN, GITHUB_PAT or
    DB_PASSWD, values with such a name in a mapping or in a string (`api_key: …`), strings that look like keys or
    tokens, and the user and password (or a token) in an address.
    """
    return _redact(data, _secrets())


_last: tuple[dict[Any, Any] | None, list[str]] = None, []  # the environment at the last call, and its secrets


def _secrets() -> list[str]:
    """The secrets in the environment, longest first."""
    global _last
    now: dict[Any, Any] | None = getattr(os.environ, "_data", None)  # CPython's: faster to compare than os.environ
    if now is None or now != _last[0]:
        stripped = ((name, value.strip()) for name, value in os.environ.items())  # as libraries send them
        values = {v for name, v in stripped if len(v) >= LEAST_CHARACTERS and _is_secret(name, v)}
        _last = now and dict(now), sorted(values, key=len, reverse=True)
    return _last[1]


def _is_secret(name: str, value: str) -> bool:
    """Whether a variable's name marks a secret, and its value is not a path or, for ambiguous names, a plain word."""
    words = secret_words(name)
    weak = all(map(WEAK_WORD.fullmatch, words))
    return bool(words) and not os.path.isabs(value) and not (weak and PLAIN_WORD.fullmatch(value))


@functools.cache
def secret_words(name: str) -> tuple[str, ...]:
    """The words of a variable's name that mark a secret. (PWD is the current folder, not a password.)"""
    words = re.split(r"[_.-]+", name)
    path = name == "PWD" or words[-1].upper() in PATH_WORDS
    return () if path else tuple(filter(SECRET_WORD.fullmatch, words))


def _redact(data: Any, values: list[str], name: str = "") -> Any:
    """Redact `data`. `values`: known secrets; `name`: the key of `data` in a mapping."""
    if isinstance(data, str):
        if name and _is_secret_value(name, data.strip()):
            return HIDDEN
        for value in values:
            data = data.replace(value, HIDDEN)
        data = SECRET_VALUE.sub(lambda m: (m["address"] or m["query"] or m["header"] or "") + HIDDEN, data)
        return PAIR.sub(_pair, data)
    if isinstance(data, dict):
        return {
            _redact(key, values): _redact(value, values, key if isinstance(key, str) else "")
            for key, value in data.items()
        }
    return [_redact(value, values, name) for value in data] if isinstance(data, list | tuple) else data


def _pair(match: re.Match[str]) -> str:
    quote, value = match["quote"] or "", match["quoted"] or match["value"]
    secret = match["name"].lower() not in COMMON and _is_secret_value(match["name"], value)
    return match["lead"] + match["name"] + match["between"] + quote + HIDDEN + quote if secret else match[0]


def _is_secret_value(name: str, value: str) -> bool:
    """Whether a value with this name is a secret: the name's last word marks it, and the value is not a number, a
    reference, a special token or, for ambiguous names, a plain word or ordinary text."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    last = re.split(r"[_.-]+", name)[-1].lower()
    if not value or last.endswith("tokens") or TOKEN_OF_TEXT.search(name) or NO_SECRET.fullmatch(value):
        return False
    if AMBIGUOUS.fullmatch(name) or KEY_OF_DATA.search(name):
        parts = re.split(r"[^A-Za-z0-9_.+/=-]+", value)
        ordinary = ORDINARY if last == "token" else COLUMN
        return not os.path.isabs(value) and not all(ordinary.fullmatch(part.strip("_.+/=-")) for part in parts)
    weak = (WEAK_WORD.fullmatch(last) or last == "token") and not STRONG_NAME.search(name)
    return bool(secret_words(last)) and not os.path.isabs(value) and not (weak and PLAIN_WORD.fullmatch(value))


def redact_arguments(arguments: list[str]) -> list[str]:
    """The arguments of a command with secrets replaced, including the values of flags such as `--hf-token X`."""
    shown: list[str] = []
    hide_next = False
    for argument in redact(arguments):
        name, equals, _ = argument.partition("=")
        secret = SECRET_WORD.fullmatch(re.split(r"[_.-]+", name)[-1])
        secret = secret and not TOKEN_OF_TEXT.search(name) and not KEY_OF_DATA.search(name)
        if hide_next:
            argument = HIDDEN
        elif secret and equals:
            argument = f"{name}={HIDDEN}"
        hide_next = secret and not equals and argument.startswith("--")
        shown.append(argument)
    return shown
