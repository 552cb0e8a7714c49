"""Names by which a server may be addressed, and what settings are refused."""

import socket
from types import SimpleNamespace

import pytest

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server import running
from mirrorsd.server.settings import ServerSettings, is_loopback

KEY = "a-key-of-enough-characters"


def test_a_loopback_server_has_three_names_at_its_port() -> None:
    assert ServerSettings().host_names(8600) == {"127.0.0.1:8600", "localhost:8600", "[::1]:8600"}
    assert "localhost" in ServerSettings().host_names(80)
    assert "localhost" not in ServerSettings().host_names(8600)


def test_an_address_and_given_names_are_added() -> None:
    settings = ServerSettings(host="192.168.1.5", keys=(KEY,), allowed_hosts=("Box.local", "other:99"))
    names = settings.host_names(8600)
    assert {"192.168.1.5:8600", "box.local", "box.local:8600", "other:99"} <= names
    assert "other:8600" not in names


def test_an_address_of_ipv6_is_a_name_with_brackets_or_without() -> None:
    """As `host` is; a client has them in its header."""
    names = {"[fd00::1]", "[fd00::1]:8600"}
    for given in ("FD00::1", "[fd00::1]"):
        assert names <= ServerSettings(allowed_hosts=(given,)).host_names(8600)
    assert "[fd00::1]:99" in ServerSettings(allowed_hosts=("[fd00::1]:99",)).host_names(8600)


def test_windows_shares_no_port_of_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the option that lets a server start again at once lets two listen, and requests go to either."""
    for name, is_shared in (("nt", False), ("posix", True)):
        monkeypatch.setattr(running, "os", SimpleNamespace(name=name))
        with running.bind(ServerSettings(port=0)) as listening:
            assert bool(listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)) == is_shared


def test_a_wildcard_adds_no_name() -> None:
    settings = ServerSettings(host="0.0.0.0", keys=(KEY,))
    assert settings.is_wildcard
    assert settings.host_names(1) == ServerSettings().host_names(1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_addresses_need_no_key(host: str) -> None:
    assert is_loopback(host)
    assert ServerSettings(host=host).keys == ()


def test_sites_are_in_lower_case_as_browsers_send_them() -> None:
    assert ServerSettings(allowed_origins=("https://Chat.Example.com",)).allowed_origins == (
        "https://chat.example.com",
    )


@pytest.mark.parametrize(
    "wrong",
    [
        *({"port": 70000}, {"seats": 0}, {"queue": -1}, {"grace_s": -1.0}, {"keys": ("has a space in it",)}),
        *({"allowed_hosts": ("a/b",)}, {"allowed_origins": ("a b://x",)}, {"allowed_origins": ("http://x/",)}),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**wrong)  # type: ignore[arg-type]


def test_a_refused_key_is_not_shown() -> None:
    with pytest.raises(ConfigError) as found:
        ServerSettings(keys=("secret words",))
    assert "secret words" not in str(found.value)
