"""One request within a time limit, and what ends it, before there is a connection."""

import httpx2
import pytest

from ragen_apo.policy.http_exchange import BrokenOffError, Exchange, http_client


def test_a_request_that_is_broken_off_while_it_connects_ends_as_broken_off() -> None:
    def connect(_: httpx2.Request) -> httpx2.Response:
        exchange.break_off()
        raise httpx2.ConnectTimeout("no answer")

    client = http_client(
        seconds=5, connect_seconds=5, key=None, transport=httpx2.MockTransport(connect)
    )
    exchange = Exchange(client, seconds=5, max_bytes=100, key=None)
    with pytest.raises(BrokenOffError):
        exchange.send("GET", "http://server.test/", None)
