"""Secrets kept out of what is stored: values of telling variables, texts that look like tokens.

    environment   variables whose names say so (..._TOKEN, ..._PASSWORD): their values, anywhere, as
                  they are, line by line, and as URLs, JSON and base64 have them
    tokens        the forms that well-known services give theirs, keys in PEM, passwords in URLs
    assignments   `password=...`, `"api_key": "..."`, `Authorization: Bearer ...`

Whatever is found becomes `***`. A value shorter than `MIN_CHARS` is looked for as a word of its
own, and only if it mixes kinds of characters. What ranks print is masked while they wait: a pattern
is tried only where one of the words is that each of its matches has.
"""

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_BEGIN, _END = b"-----BEGIN ", b"-----END "
_PREFIXES = (
    b"ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- glrt- glcbt- gldt- hf_ sk- sk_live_ rk_live_ "
    b"sk_test_ xoxa- xoxb- xoxp- xoxr- xoxs- xapp- npm_ pypi- dop_v1_ AIza ya29. AKIA ASIA eyJ "
    b"hooks.slack.com/services/"
).split()
_TOKEN = rb"(?<![A-Za-z0-9])(?:%b)[\w./-]{16,}" % b"|".join(map(re.escape, _PREFIXES))
_PEM = rb"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]{0,8192}?(?:-----END [A-Z ]{0,30}-----|\Z)"
_URL = rb"(://(?:[^\s/:@]{0,100}:|(?=[^\s/:@]{16})))[^\s/]{1,200}(?=@)"
_WORDS = (b"pass", b"secret", b"key", b"token", b"bearer", b"basic", b"_pwd")
_ASSIGNED = (
    rb"((?:password|passwd|passphrase|_pwd|(?:client_)?secret|(?:api|access|account)[_-]?key"
    rb"|auth[_-]?token|token(?=\s?=))[\"']?\s?[=:]\s?[\"']?|\b(?:bearer|basic)\s+)"
    rb"([^\s\"',;&]{4,})"
)
_SPAN_BYTES = 8 << 10
"""How far from a cut a secret is looked for that it would part."""


def is_telling(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return _TELLING.search(name) is not None


def _assigned(match: "re.Match[bytes]") -> bytes:
    # `password: wrong` and `secret: the_key` are prose: what a machine made has digits and letters.
    name, value = match[1].lower(), match[2]
    if any(word in name for word in (b"pass", b"_pwd", b"client_secret")):
        is_secret = b"=" in name or not value.isalpha()
        is_secret = is_secret and value.lower() not in (b"none", b"null", b"true", b"false")
    else:
        is_secret = len(value) >= 12 and bool(re.search(rb"\d", value))
        is_secret = is_secret and bool(re.search(rb"[A-Za-z]", value))
    return match[1] + MASK.encode() if is_secret else match[0]


_Form = tuple[Sequence[bytes], "re.Pattern[bytes]", "bytes | Callable[[re.Match[bytes]], bytes]"]
"""Words of which each match has one, the pattern, and what becomes of a match."""
_FORMS: list[_Form] = [
    (_PREFIXES, re.compile(_TOKEN), MASK.encode()),
    ((_BEGIN,), re.compile(_PEM), MASK.encode()),
    ((b"://",), re.compile(_URL), rb"\1" + MASK.encode()),
    (_WORDS, re.compile(_ASSIGNED, re.IGNORECASE), _assigned),
]


class Masker:
    """Takes secrets out of texts."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        values = {value for name, value in environ.items() if is_telling(name)}
        in_urls = (re.match(r"[\w+.-]+://[^/@:]*:([^\s/]+)@", value) for value in environ.values())
        values |= {match[1] for match in in_urls if match}
        known = sorted({form for value in values for form in _forms(value)}, key=lambda v: -len(v))
        mixed = re.compile(rf"(?![^\W\d_]*$|\d*$)\S{{{SHORT_CHARS},{MIN_CHARS - 1}}}")
        short = [_bytes(value) for value in values if mixed.fullmatch(value)]
        parts = [*map(re.escape, known), *(rb"(?<!\w)%b(?!\w)" % re.escape(v) for v in short)]
        own: list[_Form] = [((*known, *short), re.compile(b"|".join(parts)), MASK.encode())]
        self._forms = (own if parts else []) + _FORMS

    def text(self, text: str) -> str:
        """`text` with every secret as `***`."""
        return self.data(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

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
        for words, pattern, masked in self._forms:
            held = data.lower() if words is _WORDS else data
            if any(word in held for word in words):
                data = pattern.sub(masked, data)
        return data

    def settled(self, data: bytes) -> int:
        """How much of output that goes on arriving may be masked now: whole lines, and parts of
        very long ones."""
        cut = data.rfind(b"\n") + 1
        # A key in PEM has many lines, and is one secret: it waits for its last.
        begin = data.rfind(_BEGIN, 0, cut)
        is_open = begin >= 0 and data.find(_END, begin, cut) < 0
        if is_open and len(data) - begin <= MAX_HELD_BYTES:
            cut = data.rfind(b"\n", 0, begin) + 1
        if not cut and len(data) > MAX_HELD_BYTES:
            # No secret is longer than what stays behind.
            room = len(data) - MAX_HELD_BYTES // 2
            cut = self.parted(data, data.rfind(b" ", 0, room) + 1 or room) or room
        return cut

    def parted(self, data: bytes, cut: int) -> int:
        """Where to cut instead of at `cut`, so that no secret is parted: at its beginning."""
        start = max(cut - _SPAN_BYTES, 0)
        near, place = bytes(data[start : cut + _SPAN_BYTES]), cut - start
        spans = [m.span() for _, pattern, _ in self._forms for m in pattern.finditer(near)]
        return start + min((first for first, last in spans if first < place < last), default=place)


def _forms(value: str) -> Iterator[bytes]:
    """A secret as it is, and as it may be printed."""
    if len(value) < MIN_CHARS:
        return
    data = _bytes(value)
    lines = (line.strip() for line in value.splitlines() if len(line.strip()) >= MIN_CHARS)
    yield from (data, *map(_bytes, lines))  # output is masked line by line
    yield from map(_bytes, (json.dumps(value)[1:-1], repr(value)[1:-1], quote(data, safe="")))
    yield from map(_bytes, (quote(data), quote_plus(data)))
    yield base64.b64encode(data).rstrip(b"=")[:-1]  # the last ones depend on what follows


def _bytes(value: str) -> bytes:
    return value.encode(errors="surrogateescape")
