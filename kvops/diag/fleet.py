"""
Collects many hosts over SSH: a bounded pool, a time limit a host, and one dead host never holds up the
rest.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvops.diag.collect import agent
from kvops.errors import KvopsError
from kvops.host import Sight, SshHost

HOSTS_AT_ONCE = 32
SNAPSHOT_BYTES_MAX = 64 << 20  # of one host, packed
CONNECT_TIMEOUT_S = 8.0
_MARK = "KVOPS-SNAPSHOT "


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One host: its snapshot's files, or why there are none."""

    name: str
    files: dict[str, bytes] | None = None
    error: str = ""


def gather(
    hosts: Sequence[str],
    *,
    window_s: float,
    timeout_s: float,
    user: str | None = None,
    port: int = 22,
    key_file: Path | None = None,
    known_hosts: Path | None = None,
) -> list[Answer]:
    """
    Collect hosts at once.

    Args:
        hosts: Names or addresses, ``user@host:port`` where they differ from the rest.
        window_s: Seconds between the two samples on each host.
        timeout_s: Of one host, the window not counted. When it is over the host is reported and left behind.
        user: For hosts that name none; our own by default.
        port: For hosts that name none.
        key_file: The only key to offer; agent and default keys otherwise.
        known_hosts: File of accepted host keys; the user's and the system's by default.

    Returns:
        An answer for each host, in the order asked.
    """
    script = Path(agent.__file__).read_bytes()
    pool = ThreadPoolExecutor(max_workers=min(HOSTS_AT_ONCE, max(len(hosts), 1)), thread_name_prefix="ssh")
    rounds = -(-len(hosts) // HOSTS_AT_ONCE)
    deadline = time.monotonic() + (window_s + timeout_s) * max(rounds, 1)
    futures: dict[str, Future[Answer]] = {}
    for name in hosts:
        options: dict[str, Any] = {
            "user": user,
            "port": port,
            "key_file": key_file,
            "known_hosts": known_hosts,
        }
        futures[name] = pool.submit(_collect, name, script, window_s, timeout_s, options)
    wait(futures.values(), timeout=max(deadline - time.monotonic(), 0))
    answers = []
    for name, future in futures.items():
        if not future.done():
            future.cancel()
            answers.append(Answer(name=name, error=f"no answer within {timeout_s:g} s"))
        else:
            answers.append(future.result())
    pool.shutdown(wait=False, cancel_futures=True)
    return answers


def _collect(name: str, script: bytes, window_s: float, timeout_s: float, options: dict[str, Any]) -> Answer:
    address, user, port = split_host(name, options["user"], options["port"])
    began = time.monotonic()
    key_file, known_hosts = options["key_file"], options["known_hosts"]
    host: SshHost | None = None
    try:
        host = SshHost(
            address,
            name=name,
            user=user,
            port=port,
            key_file=str(key_file) if key_file is not None else None,
            known_hosts=str(known_hosts) if known_hosts is not None else None,
            timeout_s=min(CONNECT_TIMEOUT_S, timeout_s),
        )
        left = timeout_s + window_s - (time.monotonic() - began)
        argv = ("python3", "-", json.dumps({"window_s": window_s}))
        result = host.run_with_input(argv, script, timeout_s=max(left, 0.1), limit=SNAPSHOT_BYTES_MAX)
        if result.sight is not Sight.PRESENT:
            return Answer(name=name, error=result.detail or str(result.sight))
        _, mark, packed = result.stdout.partition(_MARK)
        if result.return_code != 0 or not mark:
            last = (result.stderr.strip().splitlines() or ["no snapshot came back"])[-1]
            return Answer(name=name, error=f"python3 there: {last[:200]}")
        return Answer(name=name, files=_unpack(packed))
    except KvopsError as error:
        return Answer(name=name, error=f"{error.what}; {error.fix}" if error.fix else error.what)
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
