"""How a server is run: where it listens, who may talk to it, how much it lets them ask for."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from re import fullmatch

from mirrorsd.graphs.errors import ConfigError

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_WILDCARDS = ("0.0.0.0", "::", "")
_LEAST_KEY = 16
_LONGEST_ESCAPE = 6
"""JSON may write one byte as `\\u0000`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what one client may cost. Seconds and bytes; counts are per request.

    Attributes:
        body_bytes: of a request's body, however much the context holds.
        token_bytes: of a prompt, its tools included, for each token that the context holds.
        head_bytes: of a request's line and headers.
        nesting: of JSON in schemas and tools.
        schema_bytes: of one schema or grammar, as compact JSON.
        head_s: to send a request's head, from the connection or its first byte.
        body_s: to send a request's body.
        read_s: to make tokens of a prompt, its chat template included.
        send_s: that a client may leave what was sent to it unread.
        idle_s: that a connection may stay open without a request.
        elsewhere_s: that a front looks for a server that goes on with a text.
        request_s: for an answer, waiting in the queue included.
        ping_s: of silence in a stream until a comment is sent.
        connections: open at once, beside one for each request that a server lets run or wait.
        choices: most `n`.
        stops: most stop strings, and the longest in characters.
        tools: most tools.
        calls: most calls of tools in one answer.
        messages: most messages of a conversation.
        top_logprobs: most alternatives per token.
        biases: most entries of `logit_bias`.
    """

    body_bytes: int = 8 << 20
    token_bytes: int = 16
    head_bytes: int = 16 << 10
    nesting: int = 32
    schema_bytes: int = 64 << 10
    head_s: float = 10.0
    body_s: float = 30.0
    read_s: float = 10.0
    send_s: float = 30.0
    idle_s: float = 15.0
    elsewhere_s: float = 30.0
    request_s: float = 900.0
    ping_s: float = 10.0
    connections: int = 256
    choices: int = 8
    stops: int = 16
    stop_length: int = 256
    tools: int = 128
    calls: int = 16
    messages: int = 2048
    top_logprobs: int = 20
    biases: int = 1024

    def body_bytes_for(self, context: int) -> int:
        """Most bytes of a body whose texts and schema can fit into a context.

        >>> Limits(token_bytes=16, schema_bytes=1000).body_bytes_for(512)
        55152
        """
        return min(self.body_bytes, _LONGEST_ESCAPE * (self.token_bytes * context + self.schema_bytes))

    def marks_for(self, context: int) -> int:
        """Most brackets and keys of such a body: each is at least a token of a prompt, or a byte of a schema."""
        return context + self.schema_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What `mirrorsd serve` is told.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        keys: any of these opens the server; without one, only loopback addresses are listened on.
        allowed_hosts: names, `name` or `name:port`, by which clients may reach it besides the address itself.
        allowed_origins: other sites whose pages may use it, `https://name:port`, and apps, `app://name`; in lower case,
            as browsers send them.
        seats: conversations that are answered at once and kept cached, per bundle.
        queue: requests that may wait for a seat.
        grace_s: that running answers get when the server is told to stop.
        device_map: name or path of a card, or `auto`.
        layout: one of the card's layouts.
        speculation: values of `SpeculationConfig`.
        limits: see `Limits`.
    """

    host: str = "127.0.0.1"
    port: int = 8600
    keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    seats: int = 2
    queue: int = 32
    grace_s: float = 10.0
    device_map: str = "auto"
    layout: str | None = None
    speculation: dict[str, object] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Refuse what cannot be, and what would be open to everybody."""
        _require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        _require(1 <= self.seats <= 64, "seats", self.seats, "1 to 64")
        _require(0 <= self.queue <= 4096, "queue", self.queue, "0 to 4096")
        _require(0 <= self.grace_s <= 3600, "grace_s", self.grace_s, "0 to 3600 seconds")
        for key in self.keys:
            is_good = len(key) >= _LEAST_KEY and key.isascii() and key.isprintable() and " " not in key
            if not is_good:  # the key itself is never shown
                raise ConfigError(
                    f"An API key of {len(key)} characters was given; allowed: at least {_LEAST_KEY} printable ASCII "
                    "characters without spaces. `python -c 'import secrets; print(secrets.token_urlsafe())'` makes one."
                )
        for host in self.allowed_hosts:
            _require(_is_host(host), "allowed_hosts", host, "a name or name:port, without a path or a wildcard")
        for origin in self.allowed_origins:
            scheme, _, rest = origin.partition("://")
            is_origin = fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) is not None and _is_host(rest)
            _require(
                is_origin, "allowed_origins", origin, "https://name:port, or an app's app://name; nothing behind it"
            )
        object.__setattr__(self, "allowed_origins", tuple(origin.lower() for origin in self.allowed_origins))
        if not is_loopback(self.host) and not self.keys:
            raise ConfigError(
                f"Listening on {self.host or 'every address'} opens the server to other machines, which needs an API "
                "key. Put one into MIRRORSD_API_KEY or a file for --api-key-file, or listen on 127.0.0.1."
            )

    @property
    def is_wildcard(self) -> bool:
        """Whether it listens on every address of the machine."""
        return self.host in _WILDCARDS

    def host_names(self, port: int) -> frozenset[str]:
        """Every `Host` header, in lower case, by which this server may be addressed at `port`."""
        own = () if self.is_wildcard or self.host in LOOPBACK_NAMES else (_bracketed(self.host),)
        names = {f"{name}:{port}" for name in (*LOOPBACK_NAMES, *own)}
        names |= {name for name in (*LOOPBACK_NAMES, *own) if port in (80, 443)}
        for given in self.allowed_hosts:
            has_port = given.rpartition("]")[2].count(":") == 1
            names |= {given.lower()} if has_port else {_bracketed(given), f"{_bracketed(given)}:{port}"}
        return frozenset(names)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only.

    >>> is_loopback("localhost"), is_loopback("127.3.2.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host.strip('[]')}]".lower() if ":" in host else host.lower()


def _is_host(text: str) -> bool:
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]")
    return bool(text) and set(text) <= allowed


def _require(is_true: bool, field_name: str, value: object, allowed: str) -> None:
    if not is_true:
        raise ConfigError(f"ServerSettings.{field_name} is {value!r}; allowed: {allowed}.")
