"""
The end of a probe that runs on a host: standard library of Python 3.8, one file, sent there over SSH.

It reads one JSON object a line, ``{"id": 1, "do": NAME, ...}``, and answers with a line ``KVOPS {"id": 1,
...}``. Nothing is written to the host. It ends with its standard input, or after its lifetime, whatever
happens; its listeners answer only who knows the token, and never more than they were sent.

Verbs need pyverbs, which is imported when asked for: Debian and Ubuntu have it as python3-pyverbs.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import re
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterator, Sequence

LIFETIME_S_MAX = 3600.0
SILENCE_S_MAX = 900.0  # without a request: longer than any of them takes
LINE_BYTES_MAX = 4 << 20
TARGETS_MAX = 4096
PACKETS_MAX = 20_000  # of one call, over all its targets
SECONDS_MAX = 30.0  # of one measurement
PIECE_BYTES = 1 << 20  # of a stream or copy between two looks at the clock
DATAGRAM_BYTES_MAX = 65_000
WINDOW_S = 0.25  # of a stream's rate
MTU_TRIES = 3
MTU_WAIT_S = 0.25
HEADER = struct.Struct("!16sIId")  # token, run, number, time of sending
_IGNORED = re.compile(r"^(lo|docker|br-|virbr|cni|flannel|cali|veth[0-9a-f]{7,}|kube|nodelocal)")
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PROBE = 10, 23, 3  # linux/in.h, linux/in6.h
_TOTAL_RETRANS = 100  # offset of tcpi_total_retrans in struct tcp_info (linux/tcp.h)


def read(path: str) -> str | None:
    """First bytes of a small file; None if there are none to be had."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace").strip()
    except OSError:
        return None


def listed(path: str) -> list[str]:
    """Names in a folder."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def family_of(address: str) -> int:
    """AF_INET6 where there is a colon."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def rounded(value: float | None, digits: int = 3) -> float | None:
    """For JSON."""
    return None if value is None else round(value, digits)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order: the smallest that at least ``share`` of them do not exceed."""
    return ordered[min(len(ordered) - 1, max(int(-(-share * len(ordered) // 1)) - 1, 0))]


# What there is


def addresses(netdev: str) -> list[str]:
    """The interface's IPv4 address, and its global IPv6 addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        request = struct.pack("256s", netdev.encode()[:15])
        found.append(socket.inet_ntoa(fcntl.ioctl(sock.fileno(), 0x8915, request)[20:24]))  # SIOCGIFADDR
    for line in (read("/proc/net/if_inet6") or "").splitlines():
        parts = line.split()
        if len(parts) == 6 and parts[5] == netdev and parts[3] == "00":
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(parts[0])))
    return found


def rdma_ports() -> list[dict[str, Any]]:
    """Each RDMA port with its interface, rate and GIDs that say something."""
    ports = []
    for device in listed("/sys/class/infiniband"):
        for number in listed(f"/sys/class/infiniband/{device}/ports"):
            base = f"/sys/class/infiniband/{device}/ports/{number}"
            rate = re.match(r"([0-9.]+) Gb/sec", read(base + "/rate") or "")
            gids, netdev = [], None
            for index in sorted(listed(base + "/gids"), key=lambda text: (len(text), text))[:256]:
                gid = read(f"{base}/gids/{index}")
                kind = read(f"{base}/gid_attrs/types/{index}")
                if gid and kind and gid.strip("0:"):
                    gids.append({"index": int(index), "gid": gid, "type": kind})
                    netdev = netdev or read(f"{base}/gid_attrs/ndevs/{index}")
            ports.append(
                {
                    "device": device,
                    "port": int(number),
                    "netdev": netdev,
                    "active": "ACTIVE" in (read(base + "/state") or ""),
                    "rate_gbps": float(rate.group(1)) if rate else None,
                    "gids": gids,
                }
            )
    return ports


def nics() -> list[dict[str, Any]]:
    """Interfaces with carrier and an address; those of RDMA devices alone, where there are any."""
    rdma = {p["netdev"]: p for p in rdma_ports() if p["netdev"]}
    found = []
    for netdev in listed("/sys/class/net"):
        base = "/sys/class/net/" + netdev
        if (_IGNORED.match(netdev) and netdev not in rdma) or read(base + "/carrier") != "1":
            continue
        own = addresses(netdev)
        if own:
            speed = read(base + "/speed") or ""
            found.append(
                {
                    "netdev": netdev,
                    "addresses": own,
                    "mtu": int(read(base + "/mtu") or 1500),
                    "rate_gbps": rdma[netdev]["rate_gbps"]
                    if netdev in rdma
                    else int(speed) / 1000
                    if speed.isdigit() and int(speed) > 0
                    else None,
                    "rdma": netdev in rdma,
                }
            )
    return [nic for nic in found if nic["rdma"]] if any(nic["rdma"] for nic in found) else found


def moved_bytes(netdev: str) -> tuple[int, int]:
    """(received, sent) so far; the RDMA port's own counters where they are larger: RoCE passes the kernel by."""
    totals = [int(read(f"/sys/class/net/{netdev}/statistics/{d}_bytes") or 0) for d in ("rx", "tx")]
    for port in rdma_ports():
        if port["netdev"] == netdev:
            base = f"/sys/class/infiniband/{port['device']}/ports/{port['port']}/counters/port_"
            for i, name in enumerate(("rcv_data", "xmit_data")):
                text = read(base + name) or ""
                totals[i] += int(text) * 4 if text.isdigit() else 0  # 4-byte words (IBTA PortCounters)
    return totals[0], totals[1]


def load(netdevs: Sequence[str], window_s: float) -> dict[str, Any]:
    """What the interfaces carry now."""
    window_s = min(max(window_s, 0.2), 10.0)
    before = {n: moved_bytes(n) for n in netdevs}
    began = time.monotonic()
    time.sleep(window_s)
    after = {n: moved_bytes(n) for n in netdevs}
    took = time.monotonic() - began
    return {
        "window_s": rounded(took),
        "netdevs": {
            n: {
                "rx_gbps": rounded((after[n][0] - before[n][0]) * 8 / took / 1e9, 6),
                "tx_gbps": rounded((after[n][1] - before[n][1]) * 8 / took / 1e9, 6),
            }
            for n in netdevs
        },
    }


# Sockets


def bound(kind: int, source: str, netdev: str, port: int = 0) -> socket.socket:
    """A socket that sends from this address by this interface, as the RDMA lookup does."""
    sock = socket.socket(family_of(source), kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if netdev:
            with contextlib.suppress(OSError):  # without the right to: by its address alone
                sock.setsockopt(socket.SOL_SOCKET, 25, netdev.encode() + b"\0")  # SO_BINDTODEVICE
        sock.bind((source, port))
    except BaseException:
        sock.close()
        raise
    return sock


class Listener:
    """Answers probes on one address, by TCP and UDP, until closed."""

    def __init__(self, address: str, netdev: str, token: bytes, port: int = 0) -> None:
        self.token = token
        self.tcp = bound(socket.SOCK_STREAM, address, netdev, port)
        try:
            self.tcp.listen(256)
            self.udp = bound(socket.SOCK_DGRAM, address, netdev, port)
        except BaseException:
            self.tcp.close()
            raise
        self.udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.ports = {"tcp": self.tcp.getsockname()[1], "udp": self.udp.getsockname()[1]}
        self.slots = threading.BoundedSemaphore(128)
        for target in (self._serve_tcp, self._serve_udp):
            threading.Thread(target=target, daemon=True).start()

    def close(self) -> None:
        """Wake the threads and end them."""
        for sock in (self.tcp, self.udp):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _serve_udp(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                data, peer = self.udp.recvfrom(DATAGRAM_BYTES_MAX + 100)
                if data[:16] == self.token and len(data) >= HEADER.size:
                    with contextlib.suppress(OSError):
                        # The header alone: the way back must not fail for its size.
                        self.udp.sendto(data[: HEADER.size], peer)
                if not data:
                    return  # closed

    def _serve_tcp(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                sock, _ = self.tcp.accept()
                if not self.slots.acquire(blocking=False):
                    sock.close()
                    continue
                threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(10.0)
                head = receive(sock, 17)
                if head[:16] != self.token:
                    return
                if head[16:] == b"P":
                    sock.sendall(receive(sock, 8))
                elif head[16:] == b"S":
                    self._sink(sock)
        except OSError:
            pass  # the other side went away: its own report says so
        finally:
            self.slots.release()

    def _sink(self, sock: socket.socket) -> None:
        buffer = bytearray(PIECE_BYTES)
        began = mark = time.monotonic()
        total = counted = 0
        windows = []
        while True:
            size = sock.recv_into(buffer)
            now = time.monotonic()
            total += size
            if now - mark >= WINDOW_S:
                windows.append((total - counted) * 8 / (now - mark) / 1e9)
                mark, counted = now, total
            if not size or now - began > SECONDS_MAX + 10:
                break
        took = time.monotonic() - began
        report = {"bytes": total, "seconds": took, "windows": [round(w, 4) for w in windows[:256]]}
        sock.sendall(json.dumps(report).encode() + b"\n")


def receive(sock: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, or an OSError."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise OSError(errno.ECONNRESET, "closed by the other side")
        data += piece
    return data


def why(error: OSError) -> str:
    """An error in a few words."""
    if isinstance(error, socket.timeout) or error.errno in (errno.ETIMEDOUT, errno.EAGAIN):
        return "no answer"
    return error.strerror or str(error) or type(error).__name__


def reach_tcp(
    source: str, netdev: str, targets: Sequence[tuple[str, int]], token: bytes, timeout_s: float
) -> list[dict[str, Any]]:
    """Connect to each listener and have eight bytes back."""

    def one(target: tuple[str, int]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            with bound(socket.SOCK_STREAM, source, netdev) as sock:
                sock.settimeout(timeout_s)
                sock.connect((target[0], target[1]))
                seconds = time.monotonic() - began
                sock.sendall(token + b"P" + b"kvops!!!")
                if receive(sock, 8) != b"kvops!!!":
                    return {"ok": False, "error": "something else answers there"}
            return {"ok": True, "seconds": round(seconds, 6)}
        except OSError as error:
            return {"ok": False, "error": why(error)}

    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(one, targets))


def ping_udp(
    source: str,
    netdev: str,
    targets: Sequence[tuple[str, int]],
    token: bytes,
    *,
    count: int,
    interval_s: float,
    size: int = 64,
    timeout_s: float = 1.0,
) -> list[dict[str, Any]]:
    """
    Datagrams to each target in turn, echoed there: what comes back, and how long it took.

    Returns:
        For each target ``{"sent", "received", "loss_percent", "rtt_us": {p50, p99, p999, max}, "jitter_us",
        "loss_windows_percent"}``; jitter is the mean difference of one round trip to the next (RFC 3550).
    """
    count = max(1, min(count, PACKETS_MAX // max(len(targets), 1)))
    trips: list[dict[int, float]] = [{} for _ in targets]
    sent = [0] * len(targets)
    failed: list[str | None] = [None] * len(targets)
    run = int.from_bytes(os.urandom(4), "big")
    padding = b"\0" * max(size - HEADER.size, 0)
    with bound(socket.SOCK_DGRAM, source, netdev) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)

        def drain(until: float) -> None:
            while True:
                left = until - time.monotonic()
                if not select.select([sock], [], [], max(left, 0))[0]:
                    return
                try:
                    data = sock.recv(2048)
                except OSError:
                    continue  # an ICMP error of some target: it shows as loss
                now = time.monotonic()
                if len(data) < HEADER.size:
                    continue
                key, echoed, number, then = HEADER.unpack(data[: HEADER.size])
                index = number % len(targets)
                if key == token and echoed == run and number // len(targets) < count:
                    trips[index].setdefault(number // len(targets), (now - then) * 1e6)

        deadline = time.monotonic() + SECONDS_MAX
        for turn in range(count):
            due = time.monotonic() + interval_s
            for index, target in enumerate(targets):
                head = HEADER.pack(token, run, turn * len(targets) + index, time.monotonic())
                try:
                    sock.sendto(head + padding, (target[0], target[1]))
                except OSError as error:
                    failed[index] = why(error)
                sent[index] += 1
                if index % 64 == 63:
                    drain(time.monotonic())
            drain(due)
            if time.monotonic() > deadline:
                break
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and any(len(t) < n for t, n in zip(trips, sent)):
            drain(min(end, time.monotonic() + 0.05))
    return [summary(t, n, e) for t, n, e in zip(trips, sent, failed)]


def summary(trips: dict[int, float], sent: int, error: str | None) -> dict[str, Any]:
    """One target's round trips, by number, in figures."""
    row: dict[str, Any] = {
        "sent": sent,
        "received": len(trips),
        "loss_percent": round(100.0 * (sent - len(trips)) / sent, 3) if sent else 0.0,
    }
    if error and not trips:
        row["error"] = error
    if sent >= 100:
        blocks = [range(i, min(i + 20, sent)) for i in range(0, sent, 20)]
        losses = sorted(100.0 * sum(n not in trips for n in block) / len(block) for block in blocks)
        row["loss_windows_percent"] = {
            "p50": percentile(losses, 0.5),
            "p99": percentile(losses, 0.99),
            "max": losses[-1],
        }
    if trips:
        ordered = sorted(trips.values())
        row["rtt_us"] = {
            "p50": round(percentile(ordered, 0.5), 1),
            "p99": round(percentile(ordered, 0.99), 1),
            "p999": round(percentile(ordered, 0.999), 1) if len(ordered) >= 1000 else None,
            "max": round(ordered[-1], 1),
        }
        steps = [abs(trips[n] - trips[n - 1]) for n in trips if n - 1 in trips]
        row["jitter_us"] = round(statistics.fmean(steps), 1) if steps else None
    return row


def checksum(data: bytes) -> int:
    """Of the Internet (RFC 1071)."""
    words = array.array("H", data + b"\0" * (len(data) % 2))
    total = sum(words)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ping_icmp(source: str, netdev: str, targets: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    """One echo request to each, twice if need be; by ping where raw sockets are not ours to open."""
    six = family_of(source) == socket.AF_INET6
    family, protocol = family_of(source), socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP
    sock = None
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
        with contextlib.suppress(OSError):
            sock = socket.socket(family, kind, protocol)
            break
    if sock is None:
        return [ping_tool(source, target, timeout_s) for target in targets[:64]] + [
            {"unseen": "not root: only 64 are pinged"} for _ in targets[64:]
        ]
    waiting = {target: i for i, target in enumerate(targets)}
    rows: list[dict[str, Any]] = [{"answered": False} for _ in targets]
    mark = os.urandom(2)
    with sock:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, 25, netdev.encode() + b"\0")
        sock.bind((source, 0))
        sock.setblocking(False)
        for turn in range(2):
            began = time.monotonic()
            for target, index in list(waiting.items()):
                body = mark + struct.pack("!H", index % 65536) + mark * 8
                head = struct.pack("!BBH", 128 if six else 8, 0, 0)
                if not six:
                    head = struct.pack("!BB", 8, 0) + struct.pack("=H", checksum(head + body))
                try:
                    sock.sendto(head + body, (target, 0))
                except OSError as error:
                    rows[index]["error"] = why(error)
            end = began + timeout_s
            while waiting and time.monotonic() < end:
                if not select.select([sock], [], [], max(end - time.monotonic(), 0))[0]:
                    break
                try:
                    data, peer = sock.recvfrom(2048)
                except OSError:
                    continue
                # The address tells which: an unprivileged socket has its identifier changed by the kernel.
                if peer[0] in waiting and mark * 8 in data and data[20 if len(data) > 40 else 0] in (0, 129):
                    rows[waiting.pop(peer[0])] = {
                        "answered": True,
                        "rtt_us": round((time.monotonic() - began) * 1e6, 1),
                    }
            if not waiting or turn:
                break
    return rows


def ping_tool(source: str, target: str, timeout_s: float) -> dict[str, Any]:
    """By the program."""
    if shutil.which("ping") is None:
        return {"unseen": "not root, and ping is not installed (iputils-ping)"}
    argv = ["ping", "-n", "-c", "1", "-W", str(max(int(timeout_s), 1)), "-I", source, target]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s + 2, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"unseen": str(error)}
    return {"answered": done.returncode == 0} if done.returncode in (0, 1) else {"unseen": "ping failed"}


def path_mtu(
    source: str, netdev: str, target: tuple[str, int], token: bytes, sizes: Sequence[int]
) -> dict[str, Any]:
    """
    Which sizes pass whole, don't-fragment set, whatever the kernel believes about the path.

    Args:
        source: Own address.
        netdev: Interface of it.
        target: A listener's UDP address.
        token: Its token.
        sizes: Of whole IP packets, in bytes, to try first.

    Returns:
        ``{"steps": {size: passed}, "path_mtu": largest that passed or None}``.
    """
    six = family_of(source) == socket.AF_INET6
    overhead = 48 if six else 28
    run = int.from_bytes(os.urandom(4), "big")
    steps: dict[int, bool] = {}
    with bound(socket.SOCK_DGRAM, source, netdev) as sock:
        if six:
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PROBE)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)

        def tries(wanted: Sequence[int]) -> None:
            missing = [s for s in wanted if overhead + HEADER.size <= s <= DATAGRAM_BYTES_MAX]
            for _ in range(MTU_TRIES):
                for size in list(missing):
                    head = HEADER.pack(token, run, size, time.monotonic())
                    try:
                        sock.sendto(head.ljust(size - overhead, b"\0"), (target[0], target[1]))
                    except OSError as error:
                        if error.errno == errno.EMSGSIZE:  # larger than our own interface's: no need to wait
                            steps[size] = False
                            missing.remove(size)
                if not missing:
                    return
                end = time.monotonic() + MTU_WAIT_S
                while time.monotonic() < end and not all(steps.get(s) for s in missing):
                    if not select.select([sock], [], [], max(end - time.monotonic(), 0))[0]:
                        break
                    with contextlib.suppress(OSError):
                        data = sock.recv(2048)
                        key, echoed, number, _ = HEADER.unpack(data[: HEADER.size])
                        if key == token and echoed == run:
                            steps[number] = True
                missing = [s for s in missing if not steps.get(s)]
            steps.update((s, False) for s in missing)

        tries(sorted(set(sizes))[:32])
        passed = max((s for s, ok in steps.items() if ok), default=None)
        above = min((s for s, ok in steps.items() if not ok and passed and s > passed), default=None)
        while passed and above and above - passed > 1:
            # Eight sizes at a time: three rounds find the byte.
            gap = max((above - passed) // 9, 1)
            tries(list(range(passed + gap, above, gap))[:9])
            passed = max(s for s, ok in steps.items() if ok)
            above = min(s for s, ok in steps.items() if not ok and s > passed)
    return {"steps": {str(s): ok for s, ok in sorted(steps.items())}, "path_mtu": passed}


def stream(
    source: str,
    netdev: str,
    target: tuple[str, int],
    token: bytes,
    seconds: float,
    rate_gbps: float | None,
) -> dict[str, Any]:
    """One TCP stream for so long, no faster than asked; what the other side received."""
    seconds = min(seconds, SECONDS_MAX)
    buffer = memoryview(bytes(PIECE_BYTES))
    with bound(socket.SOCK_STREAM, source, netdev) as sock:
        sock.settimeout(5.0)
        sock.connect((target[0], target[1]))
        sock.sendall(token + b"S")
        began = time.monotonic()
        sent = 0
        while (now := time.monotonic()) - began < seconds:
            if rate_gbps and sent * 8 / 1e9 > rate_gbps * (now - began):
                time.sleep(min(sent * 8 / 1e9 / rate_gbps - (now - began), 0.1))
                continue
            sent += sock.send(buffer[: PIECE_BYTES if not rate_gbps else 1 << 16])
        sock.shutdown(socket.SHUT_WR)
        report = b""
        while not report.endswith(b"\n") and len(report) < 1 << 16:
            piece = sock.recv(1 << 16)
            if not piece:
                break
            report += piece
        details = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        again = (
            struct.unpack_from("=I", details, _TOTAL_RETRANS)[0]
            if len(details) >= _TOTAL_RETRANS + 4
            else None
        )
    got = json.loads(report)
    return {
        "gbps": round(got["bytes"] * 8 / got["seconds"] / 1e9, 4) if got["seconds"] > 0 else 0.0,
        "windows_gbps": got["windows"],
        "retransmits": again,
    }


# This host's memory


def numa_nodes() -> Iterator[tuple[int, list[int]]]:
    """(node, its processors that we may use)."""
    allowed = os.sched_getaffinity(0)
    for name in listed("/sys/devices/system/node"):
        if re.match(r"node\d+$", name):
            cpus: list[int] = []
            for part in (read(f"/sys/devices/system/node/{name}/cpulist") or "").split(","):
                first, _, last = part.partition("-")
                if first.isdigit():
                    cpus += range(int(first), int(last or first) + 1)
            if allowed & set(cpus):
                yield int(name[4:]), sorted(allowed & set(cpus))


def copy_memory(size: int, seconds: float) -> list[dict[str, Any]]:
    """Copies within each NUMA node, one thread, twice the size of memory; GiB copied a second."""
    size = min(max(size, PIECE_BYTES), 1 << 30)
    seconds = min(seconds, 10.0)
    before = os.sched_getaffinity(0)
    rows = []
    try:
        for node, cpus in list(numa_nodes()) or [(0, sorted(before))]:
            os.sched_setaffinity(
                0, cpus
            )  # fresh pages come from the node of the thread that touches them first
            with mmap.mmap(-1, size) as first, mmap.mmap(-1, size) as second:
                one, two = memoryview(first), memoryview(second)
                one[:] = b"\x5a" * size
                two[:] = one
                began, copied, at = time.monotonic(), 0, 0
                while (now := time.monotonic()) - began < seconds:
                    two[at : at + PIECE_BYTES] = one[at : at + PIECE_BYTES]
                    copied += PIECE_BYTES
                    at = (at + PIECE_BYTES) % (size - size % PIECE_BYTES)
                one.release()
                two.release()
            rows.append({"node": node, "gib_s": round(copied / (now - began) / (1 << 30), 2)})
    finally:
        os.sched_setaffinity(0, before)
    return rows


def lock_memory(size: int) -> dict[str, Any]:
    """Lock so much memory and let it go: what registration will meet, where no RDMA device can be asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, size) as area:
        pointer = ctypes.c_char.from_buffer(area)
        address = ctypes.c_void_p(ctypes.addressof(pointer))
        began = time.monotonic()
        failed = libc.mlock(address, ctypes.c_size_t(size))
        seconds = time.monotonic() - began
        code = ctypes.get_errno()
        if not failed:
            libc.munlock(address, ctypes.c_size_t(size))
        del pointer
    row: dict[str, Any] = {"gib": size / (1 << 30), "seconds": round(seconds, 4)}
    if failed:
        row["error"] = os.strerror(code)
    return row


# Verbs


class Endpoint:
    """One RC queue pair with a registered buffer, by pyverbs; how the tests' stand-in looks too."""

    RD_ATOMIC = 4  # reads under way; the engine's 16 need no more to fill a link at 1 MiB each

    def __init__(self, device: str, port: int, gid_index: int, size: int) -> None:
        import pyverbs.device
        import pyverbs.mr
        import pyverbs.pd

        self._enums = enums = pyverbs_enums()
        from pyverbs.cq import CQ
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        self.size = size
        self._port, self._gid_index = port, gid_index
        self.context = pyverbs.device.Context(name=device)
        state = self.context.query_port(port)
        self.mtu = state.active_mtu
        self.gid = str(self.context.query_gid(port, gid_index))
        self.lid = state.lid
        self.pd = pyverbs.pd.PD(self.context)
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        self._access = access
        self.mr = pyverbs.mr.MR(self.pd, size, access)
        self.cq = CQ(self.context, 64)
        cap = QPCap(max_send_wr=32, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        attr = QPAttr(port_num=port)
        attr.qp_access_flags = access
        self.qp.to_init(attr)

    def local(self) -> dict[str, Any]:
        """What the other side must know."""
        return {
            "qpn": self.qp.qp_num,
            "gid": self.gid,
            "lid": self.lid,
            "rkey": self.mr.rkey,
            "address": self.mr.buf,
            "mtu": self.mtu,
        }

    def connect(self, remote: dict[str, Any]) -> None:
        """Bring the queue pair to RTS towards the other side."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        self.remote = remote
        route = GlobalRoute(dgid=GID(remote["gid"]), sgid_index=self._gid_index, hop_limit=16)
        attr = QPAttr(port_num=self._port)
        attr.qp_access_flags = self._access
        attr.dest_qp_num = remote["qpn"]
        attr.path_mtu = min(self.mtu, remote["mtu"])
        attr.rq_psn = attr.sq_psn = 0
        attr.max_dest_rd_atomic = attr.max_rd_atomic = self.RD_ATOMIC
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=self._port, dlid=remote["lid"])
        self.qp.to_rtr(attr)
        self.qp.to_rts(attr)

    def fill(self, data: bytes) -> None:
        """Put bytes into the own buffer."""
        self.mr.write(data, len(data))

    def bytes(self, size: int) -> bytes:
        """First bytes of the own buffer."""
        return bytes(self.mr.read(size, 0))

    def reads(self, size: int, count: int, timeout_s: float) -> None:
        """
        Read the other side's buffer so many times, a few under way at once.

        Raises:
            OSError: A completion with an error, or none within the time.
        """
        from pyverbs.wr import SGE, SendWR

        enums = self._enums
        posted = finished = 0
        end = time.monotonic() + timeout_s
        while finished < count:
            while posted < count and posted - finished < self.RD_ATOMIC:
                wr = SendWR(
                    wr_id=posted,
                    opcode=enums.IBV_WR_RDMA_READ,
                    num_sge=1,
                    sg=[SGE(self.mr.buf, size, self.mr.lkey)],
                    send_flags=enums.IBV_SEND_SIGNALED,
                )
                wr.set_wr_rdma(self.remote["rkey"], self.remote["address"])
                self.qp.post_send(wr)
                posted += 1
            number, completions = self.cq.poll(16)
            for completion in completions[:number]:
                if completion.status:
                    raise OSError(errno.EIO, f"completion status {completion.status}")
            finished += number
            if not number and time.monotonic() > end:
                raise OSError(errno.ETIMEDOUT, "no completion")

    def close(self) -> None:
        """In the order that verbs ask for."""
        for part in (self.qp, self.cq, self.mr, self.pd, self.context):
            part.close()


def pyverbs_enums() -> Any:
    """The constants, whatever this release calls their module."""
    try:
        import pyverbs.enums as enums
    except ImportError:
        import pyverbs.libibverbs_enums as enums
    return enums


def verbs_trouble() -> str | None:
    """Why there are no verbs here; None if there are."""
    try:
        import pyverbs.device
    except ImportError:
        return "pyverbs is not installed (apt install python3-pyverbs)"
    try:
        return None if pyverbs.device.get_device_list() else "no RDMA device"
    except Exception as error:  # noqa: BLE001 - PyverbsRDMAError, from a module that may not be there
        return f"no RDMA device can be opened: {error}"


def register(device: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Register memory in steps, and let it go at once."""
    import pyverbs.device
    import pyverbs.mr
    import pyverbs.pd

    enums = pyverbs_enums()
    rows = []
    context = pyverbs.device.Context(name=device)
    pd = pyverbs.pd.PD(context)
    try:
        for size in sizes:
            row: dict[str, Any] = {"device": device, "gib": size / (1 << 30)}
            began = time.monotonic()
            try:
                pyverbs.mr.MR(pd, size, enums.IBV_ACCESS_LOCAL_WRITE).close()
                row["seconds"] = round(time.monotonic() - began, 4)
            except Exception as error:  # noqa: BLE001 - whatever pyverbs raises is the finding
                row["error"] = str(error)[:200]
            rows.append(row)
            if "error" in row:
                break
    finally:
        pd.close()
        context.close()
    return rows


# The conversation


class Prober:
    """Answers requests one after the other."""

    def __init__(self, endpoint: Callable[..., Any] = Endpoint) -> None:
        self.listeners: dict[str, Listener] = {}
        self.endpoints: dict[str, Any] = {}
        self.seeds: dict[str, str] = {}
        self.endpoint = endpoint
        self.token = b""

    def close(self) -> None:
        """Leave nothing behind."""
        for listener in self.listeners.values():
            listener.close()
        for endpoint in self.endpoints.values():
            with contextlib.suppress(Exception):
                endpoint.close()
        self.listeners, self.endpoints = {}, {}

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """
        One answer.

        A request that cannot be carried out is answered with ``error``; never an exception.
        """
        try:
            function = getattr(self, "do_" + str(request.get("do")), None)
            if function is None:
                return {"error": f"unknown request {request.get('do')!r}"}
            answer: dict[str, Any] = function(request)
            return answer
        except OSError as error:
            if str(request.get("do")).startswith("verbs"):  # the number tells an engine's log from ours
                return {"error": f"{error.strerror or error} [{error.errno}]"}
            return {"error": why(error)}
        except Exception as error:  # noqa: BLE001 - the other side must hear what happened
            return {"error": f"{type(error).__name__}: {error}"[:300]}

    def do_hello(self, request: dict[str, Any]) -> dict[str, Any]:
        """Who we are and by which interfaces we can be reached."""
        return {
            "python": platform.python_version(),
            "uid": os.geteuid(),
            "nics": nics(),
            "rdma": rdma_ports(),
            "verbs": verbs_trouble(),
        }

    def do_listen(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open listeners on addresses: ``{"address": {"tcp": port, "udp": port} or {"error"}}``."""
        self.token = bytes.fromhex(request["token"])
        found: dict[str, Any] = {}
        for netdev, address in request["addresses"][:64]:
            try:
                self.listeners[address] = Listener(address, netdev, self.token, int(request.get("port", 0)))
                found[address] = self.listeners[address].ports
            except OSError as error:
                found[address] = {"error": why(error)}
        return {"listeners": found}

    def do_load(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the interfaces carry now."""
        return load(request["netdevs"], float(request.get("window_s", 1.0)))

    def _targets(self, request: dict[str, Any]) -> list[tuple[str, int]]:
        return [(str(host), int(port)) for host, port in request["targets"][:TARGETS_MAX]]

    def do_tcp(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reach by TCP."""
        return {
            "rows": reach_tcp(
                request["source"],
                request["netdev"],
                self._targets(request),
                self.token,
                min(float(request.get("timeout_s", 1.0)), 10.0),
            )
        }

    def do_udp(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reach, or measure, by UDP."""
        return {
            "rows": ping_udp(
                request["source"],
                request["netdev"],
                self._targets(request),
                self.token,
                count=int(request.get("count", 3)),
                interval_s=min(max(float(request.get("interval_s", 0.02)), 0.001), 1.0),
                size=min(int(request.get("size", 64)), 1400),
            )
        }

    def do_icmp(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reach by ICMP."""
        targets = [str(target) for target in request["targets"][:TARGETS_MAX]]
        return {"rows": ping_icmp(request["source"], request["netdev"], targets, 1.0)}

    def do_mtu(self, request: dict[str, Any]) -> dict[str, Any]:
        """Path MTU to each target."""
        sizes = [int(size) for size in request["sizes"]]

        def one(target: tuple[str, int]) -> dict[str, Any]:
            try:
                return path_mtu(request["source"], request["netdev"], target, self.token, sizes)
            except OSError as error:
                return {"error": why(error)}

        with ThreadPoolExecutor(max_workers=16) as pool:
            return {"rows": list(pool.map(one, self._targets(request)[:256]))}

    def do_stream(self, request: dict[str, Any]) -> dict[str, Any]:
        """Bandwidth to one target."""
        rate = request.get("rate_gbps")
        return stream(
            request["source"],
            request["netdev"],
            self._targets(request)[0],
            self.token,
            float(request.get("seconds", 1.0)),
            float(rate) if rate else None,
        )

    def do_memory(self, request: dict[str, Any]) -> dict[str, Any]:
        """Copy speed of each NUMA node."""
        return {"rows": copy_memory(int(request.get("bytes", 64 << 20)), float(request.get("seconds", 0.5)))}

    def do_register(self, request: dict[str, Any]) -> dict[str, Any]:
        """Register memory with each RDMA device; lock it where there is none."""
        free = 0
        for line in (read("/proc/meminfo") or "").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
        sizes = [int(size) for size in request["sizes"] if int(size) <= free // 4]
        trouble = verbs_trouble()
        if trouble is not None:
            return {"rows": [], "unseen": trouble, "lock": [lock_memory(size) for size in sizes[:1]]}
        devices = sorted({port["device"] for port in rdma_ports() if port["active"]})
        return {"rows": [row for device in devices for row in register(device, sizes)]}

    def do_verbs_open(self, request: dict[str, Any]) -> dict[str, Any]:
        """A queue pair, not yet connected."""
        self._close_endpoint(request["name"])
        endpoint = self.endpoint(
            request["device"], int(request["port"]), int(request["gid_index"]), int(request["bytes"])
        )
        self.endpoints[request["name"]] = endpoint
        self.seeds[request["name"]] = request["seed"]
        endpoint.fill(pattern(int(request["bytes"]), request["seed"]))
        return {"local": endpoint.local()}

    def do_verbs_connect(self, request: dict[str, Any]) -> dict[str, Any]:
        """Connect it to the other side's."""
        self.endpoints[request["name"]].connect(request["remote"])
        return {}

    def do_verbs_run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read the other side's memory: small reads for time, large ones for speed, and compare the bytes."""
        endpoint, size = self.endpoints[request["name"]], int(request["bytes"])
        trips = {}
        for number in range(min(int(request.get("count", 200)), PACKETS_MAX)):
            began = time.monotonic()
            endpoint.reads(8, 1, 5.0)
            trips[number] = (time.monotonic() - began) * 1e6
        row = summary(trips, len(trips), None)
        seconds = min(float(request.get("seconds", 0.0)), SECONDS_MAX)
        began, moved = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            endpoint.reads(size, 8, 10.0)
            moved += 8 * size
        if moved:
            row["gbps"] = round(moved * 8 / (time.monotonic() - began) / 1e9, 4)
        endpoint.fill(bytes(size))
        endpoint.reads(size, 1, 10.0)
        wanted, got = pattern(size, request["seed"]), endpoint.bytes(size)
        row["mismatches"] = sum(a != b for a, b in zip(wanted, got)) if wanted != got else 0
        endpoint.fill(pattern(size, self.seeds[request["name"]]))  # for the other side's turn
        return row

    def do_verbs_close(self, request: dict[str, Any]) -> dict[str, Any]:
        """Give the queue pair back."""
        self._close_endpoint(request["name"])
        return {}

    def _close_endpoint(self, name: str) -> None:
        endpoint = self.endpoints.pop(name, None)
        if endpoint is not None:
            endpoint.close()


def pattern(size: int, seed: str) -> bytes:
    """Bytes that differ from page to page and from peer to peer."""
    block = b"".join(
        struct.pack("!II", sum(seed.encode()) & 0xFFFFFFFF, n) for n in range(min(size // 8 + 1, 8192))
    )
    return (block * (size // len(block) + 1))[:size]


def main() -> None:
    """Answer until standard input ends."""
    wanted = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    end = time.monotonic() + min(float(wanted.get("lifetime_s", 600.0)), LIFETIME_S_MAX)
    heard = [time.monotonic()]

    def watchdog() -> None:
        # The other side may be gone without a word: nobody must find us here tomorrow.
        while time.monotonic() < min(end, heard[0] + SILENCE_S_MAX):
            time.sleep(1.0)
        os._exit(3)

    threading.Thread(target=watchdog, daemon=True).start()
    prober = Prober()
    try:
        for line in iter(lambda: sys.stdin.buffer.readline(LINE_BYTES_MAX), b""):
            request = json.loads(line)
            answer = {"id": request.get("id"), **prober.handle(request)}
            heard[0] = time.monotonic()
            sys.stdout.write("KVOPS " + json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        prober.close()


if __name__ == "__main__":
    main()
