"""A byte-for-byte TCP relay that can be cut: connections stay open, and nothing comes through any more."""

from __future__ import annotations

import selectors
import socket
import threading
from typing import Final

CHUNK_BYTES: Final = 64 << 10
LOOK_S: Final = 0.05


class CuttableRelay:
    """Relays to one address of loopback; ``cut`` and ``mend`` may be called at any time."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._cut = False
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Let nothing through, either way."""
        self._cut = True

    def mend(self) -> None:
        """Let everything through again; what was sent meanwhile arrives."""
        self._cut = False

    def close(self) -> None:
        """End it and its connections."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            if self._cut:
                threading.Event().wait(LOOK_S)
                continue
            for key, _ in self._selector.select(LOOK_S):
                if self._cut:
                    break
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._pass_on(key)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        here, _ = self._listener.accept()
        try:
            there = socket.create_connection(self._to, timeout=LOOK_S)
        except OSError:
            here.close()
            return
        for one, other in ((here, there), (there, here)):
            one.settimeout(1.0)
            self._selector.register(one, selectors.EVENT_READ, other)

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        one, other = key.fileobj, key.data
        assert isinstance(one, socket.socket)
        try:
            data = one.recv(CHUNK_BYTES)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass  # one end is gone: so is the connection
        for end in (one, other):
            try:
                self._selector.unregister(end)
            except (KeyError, ValueError):
                pass
            end.close()
