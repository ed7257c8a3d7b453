"""Secrets kept out of what is stored: values of telling variables, texts that look like tokens.

    environment   variables whose names say so (..._TOKEN, ..._PASSWORD): their values, anywhere, as
                  they are, line by line, and as URLs, JSON and base64 have them; passwords in URLs
                  that other variables hold
    tokens        the forms that well-known services give theirs, keys in PEM, passwords in URLs
    assignments   `password=...`, `--api-key ...`, `Authorization: Bearer ...`

Whatever is found becomes `***`. A value that is shorter than `MIN_CHARS` is looked for as a word of
its own, and only if it mixes kinds of characters: others would be found in half of all words, and
those shorter than `SHORT_CHARS` are left. Numbers of tokens and the like are no secrets.
"""

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus

MASK = "***"
MIN_CHARS, SHORT_CHARS = 8, 4
MAX_HELD_BYTES = 64 << 10
"""How long a line may be before a part of it is masked alone."""

_TELLING = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|AUTH|_KEY$|_PAT$|COOKIE"
    r"|_PASS$|_PWD$|_PW$|_CREDS?$|_DSN$|WEBHOOK|SIGNING|BEARER|JWT|_PIN$|_OTP$|_SALT$",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]{0,8192}?(?:-----END [A-Z ]{0,30}-----|\Z)"
    r"|\b(?:gh[pousr]_|github_pat_|gl(?:pat|rt|cbt|dt)-|hf_|sk-|[sr]k_(?:live|test)_|xox[abpors]-"
    r"|xapp-|npm_|pypi-|dop_v1_|AIza|ya29\.)[\w.-]{16,255}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[\w-]{6,2000}\.eyJ[\w-]{6,4000}\.[\w-]{10,1000}"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{16,100}"
)
_IN_URL = re.compile(
    r"(\b[a-z][a-z0-9+.-]{1,20}://(?:[^\s/:@]{0,100}:|(?=[^\s/:@]{16})))[^\s/]{1,200}(?=@)",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"^[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{0,100}:([^\s/]{1,200})@", re.I)
_ASSIGNED = re.compile(
    r"((?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|account[_-]?key"
    r"|auth[_-]?token|token|bearer|basic)"
    r"[\"']?(?:\s*[=:]\s*|\s+)(?:bearer\s+)?[\"']?)([^\s\"',;&]{12,4000})",
    re.IGNORECASE,
)
_PASSWORD = re.compile(
    r"((?:password|passwd|passphrase|_pwd|client_secret)[\"']?\s?[=:]\s?[\"']?)"
    r"(?!(?:none|null|true|false)\b)([^\s\"',;&]{4,4000})",
    re.IGNORECASE,
)
_BEGIN, _END = b"-----BEGIN ", b"-----END "
_SPAN_BYTES = 8 << 10
"""How far from a cut a secret is looked for that it would part."""


def is_telling(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return _TELLING.search(name) is not None


class Masker:
    """Takes secrets out of texts."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Know the secrets of an environment."""
        values = {value for name, value in environ.items() if is_telling(name)}
        values |= {found[1] for value in environ.values() if (found := _URL_PASSWORD.match(value))}
        forms = {form for value in values for form in _forms(value)}
        self._known = sorted(forms, key=lambda v: (-len(v), v))
        short = sorted(v for v in values if SHORT_CHARS <= len(v) < MIN_CHARS and _is_mixed(v))
        self._short = _words(short)
        self._short_data = _words([_latin(value) for value in short])
        self._known_data = [_latin(value) for value in self._known]

    def text(self, text: str) -> str:
        """`text` with every secret as `***`."""
        return _without(text, self._known, self._short)

    def words(self, words: Iterable[str]) -> list[str]:
        """A command line, its words masked; also a word that follows `--token` and its like."""
        masked: list[str] = []
        for word in words:
            option = masked[-1] if masked and masked[-1].startswith("--") else ""
            told = "=" not in option and is_telling(option.replace("-", "_")) and len(option) > 2
            masked.append(MASK if told and len(word) >= MIN_CHARS else self.text(word))
        return masked

    def data(self, data: bytes) -> bytes:
        """As `text`, of output in whatever encoding."""
        text = data.decode("latin-1")
        return _without(text, self._known_data, self._short_data).encode("latin-1")

    def parted(self, data: bytes, cut: int) -> int:
        """Where to cut instead of at `cut`, so that no secret is parted: at its beginning."""
        start = max(cut - _SPAN_BYTES, 0)
        text, place = data[start : cut + _SPAN_BYTES].decode("latin-1"), cut - start
        spans = [
            span for pattern in (_TOKEN, _IN_URL, _ASSIGNED, _PASSWORD)
            for span in (match.span() for match in pattern.finditer(text))
        ]  # fmt: skip
        spans += [span for value in self._known_data for span in _found(value, text)]
        crossing = [first for first, last in spans if first < place < last]
        return start + min(crossing) if crossing else cut


def _found(value: str, text: str) -> Iterator[tuple[int, int]]:
    at = text.find(value)
    while at >= 0:
        yield at, at + len(value)
        at = text.find(value, at + 1)


def _forms(value: str) -> Iterator[str]:
    """A secret as it is, and as it may be printed."""
    if len(value) < MIN_CHARS:
        return
    yield value
    # Output is masked line by line.
    yield from (line.strip() for line in value.splitlines() if len(line.strip()) >= MIN_CHARS)
    yield from (json.dumps(value)[1:-1], repr(value)[1:-1])
    data = value.encode(errors="surrogateescape")
    yield from (quote(data, safe=""), quote(data), quote_plus(data))
    # The last characters depend on what follows.
    yield base64.b64encode(data).decode().rstrip("=")[:-1]


def _is_mixed(value: str) -> bool:
    return not value.isalpha() and not value.isdigit() and not any(c.isspace() for c in value)


def _words(values: Iterable[str]) -> "re.Pattern[str] | None":
    listed = "|".join(map(re.escape, values))
    return re.compile(rf"(?<!\w)(?:{listed})(?!\w)") if listed else None


def _latin(value: str) -> str:
    return value.encode(errors="surrogateescape").decode("latin-1")


def _without(text: str, known: Iterable[str], short: "re.Pattern[str] | None") -> str:
    for value in known:
        text = text.replace(value, MASK)
    if short is not None:
        text = short.sub(MASK, text)
    text = _TOKEN.sub(MASK, text)
    text = _IN_URL.sub(rf"\1{MASK}", text)
    text = _ASSIGNED.sub(_assigned, text)
    return _PASSWORD.sub(_password, text)


def _assigned(match: "re.Match[str]") -> str:
    # `token: checkpoint_of_step_12` is prose: what is made up by a machine has digits and letters.
    value = match[2]
    mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
    told = "=" in match[1] or not match[1].lower().startswith("token")
    return f"{match[1]}{MASK}" if mixed and told else match[0]


def _password(match: "re.Match[str]") -> str:
    # `password: wrong` is prose.
    return match[0] if ":" in match[1] and match[2].isalpha() else f"{match[1]}{MASK}"


class Stream:
    """Output that arrives in pieces, masked line by line."""

    def __init__(self, masker: Masker) -> None:
        """Nothing has arrived."""
        self._masker = masker
        self._held = b""

    def take(self, data: bytes) -> bytes:
        """What of the output may be stored now: whole lines, and parts of very long ones."""
        data = self._held + data
        cut = self._before_a_key(data, data.rfind(b"\n") + 1)
        if not cut and len(data) > MAX_HELD_BYTES:
            # No secret is longer than what stays behind.
            room = len(data) - MAX_HELD_BYTES // 2
            cut = self._masker.parted(data, data.rfind(b" ", 0, room) + 1 or room) or room
        self._held = data[cut:]
        return self._masker.data(data[:cut]) if cut else b""

    def _before_a_key(self, data: bytes, cut: int) -> int:
        """A key in PEM has many lines, and is one secret: it waits for its last."""
        begin = data.rfind(_BEGIN, 0, cut)
        whole = begin < 0 or data.find(_END, begin, cut) >= 0
        if whole or len(data) - begin > MAX_HELD_BYTES:
            return cut
        return data.rfind(b"\n", 0, begin) + 1

    def rest(self) -> bytes:
        """What is left at the end."""
        return self._masker.data(self.release())

    def release(self) -> bytes:
        """Give up what is held, as it came: whoever takes it masks it."""
        held, self._held = self._held, b""
        return held
