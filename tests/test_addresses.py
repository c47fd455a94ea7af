"""An address is a host and a port, or refused, alike everywhere."""

from hypothesis import given
from hypothesis import strategies as st

from kvops.addresses import join_address, split_address
from kvops.errors import UsageError


@given(st.text(max_size=40))
def test_any_address(text: str) -> None:
    """Whatever is given as an address, it has a host and a port in range, or is refused."""
    try:
        host, port = split_address(text)
    except UsageError:
        return

    assert host
    assert 0 <= port <= 65_535
    assert split_address(join_address(host, port)) == (host, port)


def test_ipv6_address() -> None:
    """An IPv6 address is written in brackets, as everywhere."""
    assert join_address("::1", 7800) == "[::1]:7800"
    assert split_address("[::1]:7800") == ("::1", 7800)
