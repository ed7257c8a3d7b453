"""Secrets kept out of what is stored: values of telling variables, texts that look like tokens.

    environment   variables whose names say so (..._TOKEN, ..._PASSWORD): their values, anywhere, as
                  they are, line by line, and as URLs, JSON and base64 have them; passwords in URLs
                  that other variables hold
    tokens        the forms that well-known services give theirs, keys in PEM, passwords in URLs
    assignments   `password=...`, `--api-key ...`, `Authorization: Bearer ...`

Whatever is found becomes `***`. A value that is shorter than `MIN_CHARS` is looked for as a word of
its own, and only if it mixes kinds of characters: others would be found in half of all words, and
those shorter than `SHORT_CHARS` are left. Numbers of tokens and the like are no secrets.

What ranks print is masked while they wait, so it has to be fast: `bytes.find` looks for the few
places where a secret can begin, and regular expressions are tried only there. What is found is what
they would find everywhere (`Masker.text`), at twenty times their speed.
"""

import base64
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
_PREFIXES = (
    r"gh[pousr]_|github_pat_|gl(?:pat|rt|cbt|dt)-|hf_|sk-|[sr]k_(?:live|test)_|xox[abpors]-"
    r"|xapp-|npm_|pypi-|dop_v1_|AIza|ya29\."
)
_SLACK = "hooks.slack.com/services/"
_TOKEN = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]{0,8192}?(?:-----END [A-Z ]{0,30}-----|\Z)"
    rf"|\b(?:{_PREFIXES})[\w.-]{{16,255}}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[\w-]{6,2000}\.eyJ[\w-]{6,4000}\.[\w-]{10,1000}"
    rf"|(?<={re.escape(_SLACK)})[\w/]{{16,100}}"
)
_TOKEN_START = re.compile(rf"\b(?={_PREFIXES}|AKIA|ASIA|eyJ)")
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
        self._short_bytes = [_bytes(value) for value in short]
        self._short_data = _words([value.decode("latin-1") for value in self._short_bytes])
        self._known_data = [_bytes(value) for value in self._known]

    def text(self, text: str) -> str:
        """`text` with every secret as `***`."""
        for value in self._known:
            text = text.replace(value, MASK)
        if self._short is not None:
            text = self._short.sub(MASK, text)
        for form in _FORMS:
            text = form.pattern.sub(form.masked, text)
        return text

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
        for value in self._known_data:
            data = data.replace(value, MASK.encode())
        if self._short_data is not None and any(value in data for value in self._short_bytes):
            data = self._short_data.sub(MASK, data.decode("latin-1")).encode("latin-1")
        places: dict[_Places, list[int]] = {}
        for form in _FORMS:
            if form.places not in places:
                places[form.places] = form.places(data)
            parts, end = list[str](), 0
            for match in form.matches(data, places[form.places]):
                parts += [match.string[end : match.start()], form.masked(match)]
                end = match.end()
            if parts:
                data = "".join(parts).encode("latin-1") + data[end:]
                places.clear()
        return data

    def parted(self, data: bytes, cut: int) -> int:
        """Where to cut instead of at `cut`, so that no secret is parted: at its beginning."""
        start = max(cut - _SPAN_BYTES, 0)
        near, place = bytes(data[start : cut + _SPAN_BYTES]), cut - start
        spans = [match.span() for form in _FORMS for match in form.matches(near, form.places(near))]
        spans += [span for value in self._known_data for span in _found(value, near)]
        crossing = [first for first, last in spans if first < place < last]
        return start + min(crossing) if crossing else cut


def _found(value: bytes, data: bytes) -> Iterator[tuple[int, int]]:
    at = data.find(value)
    while at >= 0:
        yield at, at + len(value)
        at = data.find(value, at + 1)


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


def _bytes(value: str) -> bytes:
    return value.encode(errors="surrogateescape")


def _assigned(match: "re.Match[str]") -> str:
    # `token: checkpoint_of_step_12` is prose: what is made up by a machine has digits and letters.
    value = match[2]
    mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
    told = "=" in match[1] or not match[1].lower().startswith("token")
    return f"{match[1]}{MASK}" if mixed and told else match[0]


def _password(match: "re.Match[str]") -> str:
    # `password: wrong` is prose.
    return match[0] if ":" in match[1] and match[2].isalpha() else f"{match[1]}{MASK}"


_Places = Callable[[bytes], list[int]]


@dataclass(frozen=True)
class _Form:
    """A form of secrets. `places`: where it can begin, in order, found without `pattern`."""

    pattern: "re.Pattern[str]"
    masked: "Callable[[re.Match[str]], str]"
    places: _Places

    def matches(self, data: bytes, places: list[int]) -> "Iterator[re.Match[str]]":
        """What `pattern.finditer` finds in `data` as Latin-1."""
        text, end = "", 0
        for at in places:
            text = text or data.decode("latin-1")
            if at >= end and (match := self.pattern.match(text, at)):
                end = match.end()
                yield match


_IN_TOKENS = bytes(120 if re.match(r"[\w.-]", chr(code)) else 32 for code in range(256))
_RUN = b"x" * 19
"""The shortest token, translated by `_IN_TOKENS`."""
_SCHEME = re.compile(rb"\b[a-z](?=[a-z0-9+.-]{1,20}://)", re.IGNORECASE)
_USER = re.compile(rb"[^\s/]{1,301}@")
_WORDS = {
    b"pass": (0,), b"secret": (0, 7), b"key": (3, 4, 6, 7, 8), b"token": (0, 4, 5),
    b"bearer": (0,), b"basic": (0,), b"_pwd": (0,),
}  # fmt: skip
"""In every match of `_ASSIGNED` and `_PASSWORD`, so many bytes after its beginning."""
_AFTER_WORD = {b"w", b"p"} | {
    bytes([code]) for code in range(256) if re.match(r"[\"'\s=:]", chr(code))
}
"""What may follow one of `_WORDS`: passWord, passPhrase, a quote, a separator."""


def _places_of_tokens(data: bytes) -> list[int]:
    places = [at for at, _ in _found(_BEGIN, data)]
    places += [end for _, end in _found(_SLACK.encode(), data)]
    runs = data.translate(_IN_TOKENS)
    at = runs.find(_RUN)
    while at >= 0:
        end = runs.find(b" ", at)
        end = len(runs) if end < 0 else end
        if starts := (_starts if end - at > 128 else _starts_of_names)(data[at:end]):
            places += [at + start for start in starts]
        at = runs.find(_RUN, end)
    return sorted(places)


def _starts(run: bytes) -> list[int]:
    return [match.start() for match in _TOKEN_START.finditer(run.decode("latin-1"))]


# What is that long in a log is mostly a path or a module's name, and comes again.
_starts_of_names = functools.lru_cache(4096)(_starts)


def _places_of_urls(data: bytes) -> list[int]:
    return [
        match.start()
        for at, end in _found(b"://", data) if _USER.match(data, end)
        for match in _SCHEME.finditer(data, max(at - 21, 0), end)
    ]  # fmt: skip


def _places_of_words(data: bytes) -> list[int]:
    lower = data.lower()
    places = {
        at - before
        for word, earlier in _WORDS.items()
        for at, end in _found(word, lower) if lower[end : end + 1] in _AFTER_WORD
        for before in earlier if at >= before
    }  # fmt: skip
    return sorted(places)


_FORMS = (
    _Form(_TOKEN, lambda match: MASK, _places_of_tokens),
    _Form(_IN_URL, lambda match: match[1] + MASK, _places_of_urls),
    _Form(_ASSIGNED, _assigned, _places_of_words),
    _Form(_PASSWORD, _password, _places_of_words),
)


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
