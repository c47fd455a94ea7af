"""Asking etcd who leads: what an operator is told when its answer is none."""

from __future__ import annotations

import socket
import threading

import pytest

from kvops.errors import Unreachable
from kvops.net.etcd_query import EtcdEndpoint, leader_view


def test_an_etcd_with_tls_alone_is_named_so() -> None:
    """Who comes without TLS to a member that insists on it is told what to write instead, not just 400."""
    refusal = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)

        def refuse() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.settimeout(20)
                peer.recv(4_096)
                peer.sendall(refusal)

        server = threading.Thread(target=refuse)
        server.start()
        with pytest.raises(Unreachable, match="takes TLS alone") as caught:
            leader_view([EtcdEndpoint("127.0.0.1", listening.getsockname()[1], "g")], timeout_s=20)
        server.join(20)

    assert "masters' own addresses" in caught.value.fix
