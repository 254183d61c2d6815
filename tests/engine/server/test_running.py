"""Binding an address: what cannot be listened on is said in one line, before anything else is made."""

import socket

import pytest

from engine.server.running import BindError, bind


def test_port_0_is_any_free_one():
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as other:
        assert len({one.getsockname()[1], other.getsockname()[1], 0}) == 3
        with socket.create_connection(one.getsockname()):
            pass


def test_an_address_that_is_taken():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: Address already in use: choose"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["", "no such host", "256.256.256.256", "\0", "x" * 300])
def test_hosts_that_are_none(host):
    with pytest.raises(BindError, match=r"^cannot listen on "):
        bind(host, 0)


def test_a_host_that_is_another_machines():
    with pytest.raises(BindError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)
