"""Who may ask: reading only, from this page only, under this name only, with the token where one is needed."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "tuner_dashboard"
LONGEST = 4096  # of a path, and of a query
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether a bound address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Wraps the application; what it lets through gets the headers that keep a browser from doing anything else."""

    def __init__(self, app: ASGIApp, *, token: str | None, names: Iterable[str] | None) -> None:
        """`token`: asked of everyone when set; `names`: the host names served, None for any."""
        self._app = app
        self._token = token
        self._names = None if names is None else frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return _refuse(405, "the dashboard only shows")
        if max(len(scope["path"]), len(scope["query_string"])) > LONGEST:
            return _refuse(414, "the address is too long")
        host = headers.get("host", "")
        if self._names is not None and _name(host) not in self._names:
            return _refuse(421, "this dashboard is served as localhost only")
        if not _same_origin(headers, host, scope["path"]):
            return _refuse(403, "another site may not read this dashboard")
        return self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        if self._token is None:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and self._is_token(given):
            if scope["path"] != "/":
                return None
            # Out of the address bar and the history as soon as the browser knows it.
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return response
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        for part in headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == COOKIE and self._is_token(value):
                return None
        return _refuse(401, "open the address with ?token=… that `tuner dashboard` printed")

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _name(host: str) -> str:
    """Return the host without its port, lower case."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _same_origin(headers: Headers, host: str, path: str) -> bool:
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return False  # an origin is scheme://host[:port] and nothing else (RFC 6454)
    site = headers.get("sec-fetch-site", "none")
    # Following a link to the page is no danger; reading its data from elsewhere is.
    return site in ("none", "same-origin") or (path == "/" and headers.get("sec-fetch-mode") == "navigate")


def _refuse(status: int, why: str) -> Response:
    return PlainTextResponse(why + "\n", status_code=status)
