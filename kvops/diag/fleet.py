"""
Collects many hosts over SSH: a bounded number at once, a time limit a host, and one dead host never holds
up the rest.
"""

from __future__ import annotations

import base64
import io
import json
import queue
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvops.diag.collect import agent
from kvops.errors import KvopsError, Unreachable
from kvops.host import Sight, SshHost, SshLogin

HOSTS_AT_ONCE = 64
SNAPSHOT_BYTES_MAX = 64 << 20  # of one host, packed
CONNECT_TIMEOUT_S = 8.0
PYTHON_MIN = (3, 8)
_MARK = "KVOPS-SNAPSHOT "

# Reads the program from its standard input, so that nothing is left on the host; an older Python could not even
# compile it, and would say so in a way that nobody understands.
BOOT = (
    "import sys\n"
    f"if sys.version_info < {PYTHON_MIN}: sys.exit('python3 there is %d.%d; "
    f"{PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer is needed' % sys.version_info[:2])\n"
    "sys.argv[0] = 'kvops'\n"
    "size = int(sys.argv.pop(1))\n"
    "exec(compile(sys.stdin.buffer.read(size), 'kvops', 'exec'), {'__name__': '__main__'})"
)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One host: its snapshot's files, or why there are none."""

    name: str
    files: dict[str, bytes] | None = None
    error: str = ""
    seconds: float = 0.0


def at_once(
    work: Mapping[str, Callable[[], Value]], *, timeout_s: float, limit: int = HOSTS_AT_ONCE
) -> dict[str, Value | KvopsError | None]:
    """
    Call functions on threads of their own, a bounded number at once.

    Args:
        work: Name → function. It should keep to ``timeout_s`` itself; one that does not is left behind.
        timeout_s: Of one call, from its own start.
        limit: How many run at once.

    Returns:
        Name → what it gave, the KvopsError it raised, or None when it did not end in time; in the order asked.
    """
    done: queue.SimpleQueue[tuple[str, Value | KvopsError | BaseException]] = queue.SimpleQueue()

    def call(name: str, function: Callable[[], Value]) -> None:
        try:
            done.put((name, function()))
        except BaseException as error:  # noqa: BLE001 - it is raised again where the results are awaited
            done.put((name, error))

    waiting = list(work.items())[::-1]
    running: dict[str, float] = {}  # name → when its time is over
    results: dict[str, Value | KvopsError | None] = dict.fromkeys(work)
    while waiting or running:
        while waiting and len(running) < limit:
            name, function = waiting.pop()
            # A daemon: one that hangs in a system call does not keep the process from ending.
            threading.Thread(target=call, args=(name, function), name=f"host-{name}", daemon=True).start()
            running[name] = time.monotonic() + timeout_s
        try:
            left = min(running.values()) - time.monotonic()
            name, value = done.get(timeout=max(left, 0.001))
        except queue.Empty:
            now = time.monotonic()
            running = {name: end for name, end in running.items() if end > now}
            continue
        if name not in running:
            continue  # it was given up, and answers now
        del running[name]
        if isinstance(value, BaseException) and not isinstance(value, KvopsError):
            raise value
        results[name] = value
    return results


def gather(hosts: Sequence[SshLogin], *, window_s: float, timeout_s: float) -> list[Answer]:
    """
    Collect hosts at once.

    Args:
        hosts: How to reach each.
        window_s: Seconds between the two samples on each host.
        timeout_s: Of one host, the window not counted. When it is over the host is reported and left behind.

    Returns:
        An answer for each host, in the order asked.
    """
    script = Path(agent.__file__).read_bytes()
    work = {host.name: partial(_collect, host, script, window_s, timeout_s) for host in hosts}
    # A little more than a host's own limit: its own words say more than "no answer".
    answers = at_once(work, timeout_s=window_s + timeout_s + 1.0)
    return [
        answer
        if isinstance(answer, Answer)
        else Answer(name=name, error=str(answer) if answer else f"no answer within {timeout_s:g} s")
        for name, answer in answers.items()
    ]


def collect_one(login: SshLogin, window_s: float, *, timeout_s: float) -> dict[str, bytes]:
    """A host's snapshot files. Raises Unreachable with the reason when there are none."""
    answer = gather([login], window_s=window_s, timeout_s=timeout_s)[0]
    if answer.files is None:
        raise Unreachable(f"{login.name}: {answer.error}", fix="see kvops diagnose --host")
    return answer.files


def _collect(login: SshLogin, script: bytes, window_s: float, timeout_s: float) -> Answer:
    name = login.name
    began = time.monotonic()
    host: SshHost | None = None
    try:
        host = login.connect(min(CONNECT_TIMEOUT_S, timeout_s))
        left = timeout_s + window_s - (time.monotonic() - began)
        wanted = json.dumps({"window_s": window_s})
        argv = ("python3", "-c", BOOT, str(len(script)), wanted)
        result = host.run_with_input(argv, script, timeout_s=max(left, 0.1), limit=SNAPSHOT_BYTES_MAX)
        if result.sight is Sight.NO_TOOL:
            return Answer(name=name, error="python3 is not installed there; install it, 3.8 or newer")
        if result.sight is not Sight.PRESENT:
            return Answer(name=name, error=result.detail or str(result.sight))
        _, mark, packed = result.stdout.partition(_MARK)
        if result.return_code != 0 or not mark:
            last = (result.stderr.strip().splitlines() or ["no snapshot came back"])[-1]
            return Answer(name=name, error=last[:200])
        return Answer(name=name, files=_unpack(packed), seconds=time.monotonic() - began)
    except KvopsError as error:
        what = error.what.removeprefix(f"{name}: ")
        return Answer(name=name, error=f"{what}; {error.fix}" if error.fix else what)
    except (ValueError, tarfile.TarError, EOFError, OSError) as error:
        return Answer(name=name, error=f"a damaged snapshot came back: {error}")
    finally:
        if host is not None:
            host.close()


def split_host(text: str, user: str | None, port: int) -> tuple[str, str | None, int]:
    """``user@host:port`` as (host, user, port); what is not said is taken from the arguments."""
    name, at, rest = text.rpartition("@")
    if at:
        user = name
    if rest.startswith("["):
        address, _, tail = rest[1:].partition("]")
        number = tail.removeprefix(":")
    elif rest.count(":") == 1:
        address, _, number = rest.partition(":")
    else:
        address, number = rest, ""
    return address, user, int(number) if number.isascii() and number.isdigit() else port


def _unpack(packed: str) -> dict[str, bytes]:
    """Files of the tar that the other side printed; anything but plain files inside it is passed over."""
    files: dict[str, bytes] = {}
    with tarfile.open(
        fileobj=io.BytesIO(base64.b64decode(packed.strip(), validate=True)), mode="r:gz"
    ) as archive:
        for member in archive:
            if member.isfile() and not member.name.startswith("/") and ".." not in member.name.split("/"):
                file = archive.extractfile(member)
                files[member.name] = file.read(SNAPSHOT_BYTES_MAX) if file is not None else b""
    return files
