"""Small real servers for faults to trouble: started, found again after a restart, reaped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvops.chaos.netns import call_in, inode_of
from kvops.chaos.procs import running
from kvops.chaos.targets import Target, of_process
from kvops.errors import Unreachable
from tests import ports
from tests.waiting import WAIT_S, until

SERVER = """
import http.server, os, select, signal, sys, threading
name, host, port, child, tester = sys.argv[1:]
def end_with_the_tests():
    poll = select.poll()
    poll.register(os.pidfd_open(int(tester)), select.POLLIN)
    poll.poll()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_the_tests, daemon=True).start()
if child == "child" and os.fork() == 0:
    signal.pause()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0:
            left -= len(self.rfile.read(min(left, 1 << 16)))
        body = name.encode() if self.path == "/health" else bytes(65536)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    request_queue_size = 64
    def handle_error(self, request, client_address): pass
Server((host, int(port)), Handler).serve_forever()
"""


def listens(host: str, port: int) -> bool:
    """Whether a connection is accepted."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


class Victim:
    """One server process."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        child: bool = False,
        host: str = "127.0.0.1",
        netns: str = "",
        user: int = 0,
    ) -> None:
        self.name = name
        self.host = host
        self._enter = ["nsenter", f"--net=/run/netns/{netns}"] if netns else []
        if user:
            self._enter = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        self._held = ports.hold()
        self.port = ports.number(self._held)
        self.log_file = folder / f"{name}.log"
        # Not -I: what a shim preloads must reach it, and StartProcess runs it with the same environment.
        self.argv = [
            sys.executable,
            "-c",
            SERVER,
            name,
            host,
            str(self.port),
            "child" if child else "alone",
            str(os.getpid()),
        ]
        self._child = child
        try:
            self.start()
        except BaseException:
            self.end()
            raise

    def start(self) -> None:
        """Run it and wait until it listens."""
        self.process = subprocess.Popen(
            [*self._enter, *self.argv], stdin=subprocess.DEVNULL, start_new_session=True
        )
        until(self._listens, f"{self.name} listens")
        if self._child:
            until(lambda: len(self.target.processes) == 2, f"{self.name} has a child")

    def _listens(self) -> bool:
        found = next(running(self.argv), None)
        if found is None:
            return False
        inode = inode_of(found.pid)
        return call_in(inode, lambda: listens(self.host, self.port))

    @property
    def alive(self) -> bool:
        """Whether it runs; collects it when it has ended."""
        self.process.poll()
        return next(running(self.argv), None) is not None

    @property
    def target(self) -> Target:
        """As faults take it: the process that runs now."""
        found = next(running(self.argv), None)
        assert found is not None, f"{self.name} does not run"
        return of_process(
            found.pid,
            name=self.name,
            role="server",
            addresses={"http": f"{self.host}:{self.port}"},
            log_file=str(self.log_file),
        )

    def end(self) -> None:
        """Kill whatever runs under this command line, and its children."""
        self.process.poll()
        while (found := next(running(self.argv), None)) is not None:
            with suppress(Unreachable, ProcessLookupError):  # it may be ending: the next look tells
                for one in of_process(found.pid, name=self.name).processes:
                    os.kill(one.pid, signal.SIGKILL)
                    os.kill(one.pid, signal.SIGCONT)
            self.process.poll()
            until(lambda found=found: next(running(self.argv), None) != found, f"{self.name} ends")
        self.process.kill()
        self.process.wait(WAIT_S)
        self._held.close()


@contextmanager
def victims(count: int = 2, *, child: bool = False, user: int = 0) -> Iterator[list[Victim]]:
    """Servers, the first of which may have a child."""
    with ExitStack() as ends:  # each is ended, whatever becomes of the others
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvops-")))
        found: list[Victim] = []
        for index in range(count):
            victim = Victim(f"server-{index}", folder, child=child and index == 0, user=user)
            ends.callback(victim.end)
            found.append(victim)
        yield found
