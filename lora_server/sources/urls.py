"""URLs of adapters: accepted schemes, the canonical form, and the list of --allow-source."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

from lora_server.adapters.refusal import clip
from lora_server.errors import AdapterSourceError, ConfigError

EXTRAS = {"http": "http", "https": "http", "s3": "s3", "hf": "hf", "gs": "gs"}  # by scheme, the package's extra
ACCEPTED = "a plain path, file:///PATH, http://, https://, s3://, gs:// or hf://"
MOST_DECODINGS = 8
_URL = re.compile(r"([^/]*)://.*", re.DOTALL)
_SEPARATORS = re.compile(r"[/\\]")


def is_remote(source: str) -> bool:
    """Return whether a source is a URL other than a file of this host."""
    match = _URL.fullmatch(source)
    return match is not None and match[1].lower() != "file"


def canonical(url: str) -> str:
    """Return the canonical form of a URL; raises AdapterSourceError for one that cannot be an adapter's directory."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in EXTRAS or not rest:
        raise AdapterSourceError(f"adapter source: got {clip(scheme)!r}:// as its scheme, expected {ACCEPTED}")
    host = rest.partition("/")[0]
    secret = "@" in host and scheme.lower() != "hf"  # `adapters list` would show it
    if secret or any(mark in rest for mark in ("::", "?", "#")):
        raise AdapterSourceError(
            f"adapter source {scheme}://...: got a URL with a query, a fragment, a password or a chain, expected that "
            f"of a directory, as {ACCEPTED}; give credentials to the server's processes, in their environment or "
            "their home"
        )
    return f"{scheme.lower()}://{rest.rstrip('/')}"


def prefixes(allow_source: Iterable[str]) -> tuple[str, ...]:
    """Return the canonical prefixes of --allow-source; raises ConfigError for one that begins no URL."""
    return tuple(map(_prefix, allow_source))


def is_listed(url: str, listed: Iterable[str]) -> bool:
    """Return whether a URL is below one of these, and has no `..` in any encoding."""
    return not _steps_up(url) and any(_is_below(url, one) for one in listed)


def _prefix(text: str) -> str:
    try:
        if is_remote(text):
            return canonical(text)
        reason = "no URL"
    except AdapterSourceError as error:
        reason = str(error)
    raise ConfigError(
        f"--allow-source: got {text!r}, expected the beginning of a URL, such as s3://adapters ({reason})"
    )


def _is_below(url: str, prefix: str) -> bool:
    ends = ("/", "@") if prefix.startswith("hf://") else ("/",)  # a revision
    return url == prefix or url.startswith(tuple(prefix + end for end in ends))


def _steps_up(url: str) -> bool:
    """Return whether a part is `.` or `..`, also after decoding: some servers decode twice."""
    for _ in range(MOST_DECODINGS):
        if any(part in (".", "..") for part in _SEPARATORS.split(url)):
            return True
        decoded = unquote(url)
        if decoded == url:
            return False
        url = decoded
    return True
