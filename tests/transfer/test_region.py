"""Registered memory: a store on the writer's host copies from it, and is never harmed by it."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvops.errors import ClosedPool, Refused, UsageError, WrongBuffer
from kvops.limits import REGION_BYTES_MAX
from kvops.store.client import Pool
from kvops.store.model import Reason
from kvops.transfer.region import Borrowed, Region, Regions
from tests.pool import ROOT, LocalPool, Member
from tests.waiting import WAIT_S, until

MIB = 1 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[LocalPool]:
    with closing(LocalPool(stores=1)) as pool:
        yield pool


@pytest.fixture
def pool(running: LocalPool) -> Iterator[LocalPool]:
    """A master and a store, in order and empty."""
    yield running
    running.heal()
    client = running.connect()
    for listed in client.ls()[0]:
        client.remove(listed["key"])


def copied_bytes(store: Member) -> int:
    """What a store says it has copied from registered memory."""
    with urllib.request.urlopen(f"http://{store.addresses['http']}/metrics", timeout=WAIT_S) as page:
        lines = page.read().decode().splitlines()
    name = "kvops_store_registered_bytes_total"
    return int(float(next(line for line in lines if line.startswith(name)).split()[1]))


def fill(memory: memoryview) -> memoryview:
    """Give every page bytes of its own."""
    for at in range(0, len(memory), 4096):
        memory[at : at + 8] = (at * 2_654_435_761 % 2**64).to_bytes(8, "little")
    return memory


def register(client: Pool, memory: memoryview) -> None:
    """Put until the store knows the region: the first put goes by the socket."""
    assert client.put("first", memory[:4096]).ok
    client.remove("first")


def test_a_put_from_registered_memory_sends_no_payload(pool: LocalPool) -> None:
    """Objects of every size come out as they went in, and the store has copied them by itself."""
    client = pool.connect()
    memory = fill(client.allocate(8 * MIB))
    register(client, memory)
    before = copied_bytes(pool.stores[0])
    sizes = [1, 4096, 65_537, 3 * MIB + 5, *[5_000] * 150]
    spans = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    keys = [f"k{number}" for number in range(len(sizes))]

    outcomes = client.batch_put_from(keys, [memory[start:end] for start, end in spans])

    assert {outcome.reason for outcome in outcomes} == {Reason.STORED}
    assert [client.get(key) for key in keys] == [bytes(memory[start:end]) for start, end in spans]
    assert copied_bytes(pool.stores[0]) - before == sum(sizes)
    for key in keys:
        client.remove(key)


def regions_of(store: Member) -> int:
    """How many descriptors of registered memory a store's process holds."""
    assert store.process is not None
    count = 0
    for descriptor in Path(f"/proc/{store.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += "kvops-region" in str(descriptor.readlink())
    return count


def test_a_store_lets_go_of_memory(pool: LocalPool) -> None:
    """A writer's memory is held for as long as it is connected, and never mapped."""
    (store,) = pool.stores
    assert store.process is not None
    until(lambda: not regions_of(store), "writers of other tests are gone")
    client = pool.connect()
    register(client, fill(client.allocate(MIB)))
    assert regions_of(store) == 1
    assert "kvops-region" not in Path(f"/proc/{store.process.pid}/maps").read_text()
    client.close()
    until(lambda: not regions_of(store), "nothing is held any more")


def test_one_batch_may_mix_memory(pool: LocalPool) -> None:
    """Registered, foreign, read-only and reaching beyond: each object arrives, in the order of the keys."""
    client = pool.connect()
    memory = fill(client.allocate(MIB))
    register(client, memory)
    data = [
        memory[:9_000],
        bytes(5_000),
        memory[9_000:20_000].toreadonly(),
        memory[20_000:],
        b"x" * 70_000,
        memory[:1],
    ]
    keys = [f"k{number}" for number in range(len(data))]

    assert {outcome.reason for outcome in client.batch_put_from(keys, data)} == {Reason.STORED}

    assert [client.get(key) for key in keys] == [bytes(view) for view in data]
    for key in keys:
        client.remove(key)


def test_a_restarted_store_is_told_anew(pool: LocalPool) -> None:
    """Registered memory is a connection's: another process of the store gets it again."""
    client = pool.connect()
    memory = fill(client.allocate(MIB))
    register(client, memory)
    (store,) = pool.stores
    store.send(signal.SIGKILL)
    pool.start(store)
    pool.wait_ready(store)

    def stored() -> bool:
        client.put("again", memory[:50_000])
        return client.get("again") == memory[:50_000]

    until(stored, "puts work again")
    until(lambda: client.put(f"more{time.monotonic()}", memory[:100]).ok and copied_bytes(store), "it copies")


def test_memory_outlives_the_pool_it_came_from(pool: LocalPool) -> None:
    """After ``close`` an engine's pages are still its own; another pool sends them by the socket."""
    client = pool.connect()
    memory = fill(client.allocate(MIB))
    client.close()

    with pool.connect() as other:
        assert other.put("k", memory[:5_000]).ok
        assert other.get("k") == memory[:5_000]
        other.remove("k")


def test_a_store_outlives_a_writer_that_dies(pool: LocalPool) -> None:
    """A writer killed in the middle of its puts takes no store along: mapped pages stay."""
    program = """
import kvops, sys
pool = kvops.connect(sys.argv[1], secret_file=sys.argv[2], host="host-0", deadline_ms=30000)
memory = pool.allocate(16 << 20)
for number in range(10_000):
    pool.batch_put_from([f"w{number % 7}/{i}" for i in range(16)], [memory[i << 20 : i + 1 << 20] for i in range(16)])
    for i in range(16):
        pool.remove(f"w{number % 7}/{i}")
    print(number, flush=True)
"""
    writer = subprocess.Popen(
        [sys.executable, "-c", program, pool.addresses[0], str(pool.secret_file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    try:
        with writer.stdout as lines:
            for _ in range(3):
                assert lines.readline()
            writer.kill()
    finally:
        writer.kill()
        writer.wait(WAIT_S)
    assert pool.stores[0].alive
    client = pool.connect()
    until(lambda: client.put("after", b"data").ok, "the store serves")
    assert client.get("after") == b"data"


def test_a_fork_goes_on_with_the_same_memory(pool: LocalPool) -> None:
    """A child puts from its parent's memory, both before and after it has changed it, and the parent goes on."""
    client = pool.connect()
    memory = fill(client.allocate(MIB))
    register(client, memory)
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            before = client.put("before", memory[:5_000]).ok and client.get("before") == memory[:5_000]
            memory[:4] = b"both"
            after = client.put("after", memory[:5_000]).ok and client.get("after") == memory[:5_000]
            client.close()
            code = 0 if before and after else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert memory[:4] == b"both"
    before = copied_bytes(pool.stores[0])
    assert client.put("parent", memory[:5_000]).ok
    assert client.get("parent") == memory[:5_000]
    assert copied_bytes(pool.stores[0]) - before == 5_000


def test_threads_put_from_the_same_memory(pool: LocalPool) -> None:
    """Each object is what its thread put, whoever else puts from the same bytes and allocates beside it."""
    client = pool.connect()
    memory = fill(client.allocate(2 * MIB))
    register(client, memory)

    def put(number: int) -> bool:
        client.allocate(4_096)
        view = memory[number * 1_000 : number * 1_000 + MIB]
        return client.put(f"t{number}", view).ok and client.get(f"t{number}") == view

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(put, range(8)))


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64, np.complex64])
def test_arrays_lie_in_registered_memory(pool: LocalPool, dtype: type[np.generic]) -> None:
    """What numpy and other views make of the memory is found in it: the store copies, and it comes out the same."""
    client = pool.connect()
    memory = fill(client.allocate(MIB))
    register(client, memory)
    array = np.frombuffer(memory, dtype)
    before = copied_bytes(pool.stores[0])

    assert client.put("flat", array).ok
    assert client.put("shaped", array.reshape(4, -1)[1:3]).ok
    assert client.put("cast", memory[:800].cast("d", (10, 10))).ok

    assert client.get("flat") == memory
    assert client.get("shaped") == memory[MIB // 4 : 3 * MIB // 4]
    assert client.get("cast") == memory[:800]
    assert copied_bytes(pool.stores[0]) - before == MIB + MIB // 2 + 800


def test_memory_that_its_user_let_go_of(pool: LocalPool) -> None:
    """Views may be released at will: what comes to lie elsewhere is never taken for the region's memory."""
    client = pool.connect()
    with client.allocate(2 * MIB) as memory:
        register(client, fill(memory))
    with pytest.raises(WrongBuffer, match="released"):
        client.put("released", memory)
    others = [memoryview(mmap.mmap(-1, 2 * MIB)) for _ in range(4)]
    for number, other in enumerate(others):
        assert client.put(f"other{number}", fill(other)).ok
        assert client.get(f"other{number}") == other


def test_a_closed_pool_allocates_nothing(pool: LocalPool) -> None:
    """As with every other call: the error says that it is closed."""
    client = pool.connect()
    client.close()
    with pytest.raises(ClosedPool):
        client.allocate(4_096)


# The writer's side alone.


def test_a_buffer_is_found_in_its_region() -> None:
    """By where it lies: whole buffers inside one region, nothing that reaches out of it."""
    regions = Regions()
    first, second = regions.allocate(8192), regions.allocate(4096)
    found = regions.find(second[100:200])
    assert found is not None
    assert found[1] == 100
    assert regions.find(memoryview(bytearray(10))) is None
    assert regions.find(first[:10].toreadonly()) is None
    regions.close()
    assert regions.find(first) is None


def files_open() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_released_memory_is_the_regions_still() -> None:
    """A region's address is nobody else's for as long as it is shared."""
    regions = Regions()
    regions.allocate(MIB).release()
    others = [mmap.mmap(-1, MIB) for _ in range(4)]
    assert [regions.find(memoryview(other)) for other in others] == [None] * 4
    regions.close()


@pytest.mark.parametrize("size", [0, -1, REGION_BYTES_MAX + 1, 1.5, "4096", None, float("inf")])
def test_no_region_of_an_absurd_size(size: Any) -> None:
    """The error says what may be asked for, and no descriptor is left over."""
    before = files_open()
    with pytest.raises(UsageError, match="region"):
        Region(size)
    assert files_open() == before


LIMITED = """
import os, resource, sys
from kvops.errors import Refused
from kvops.transfer.region import Region
which = getattr(resource, "RLIMIT_" + sys.argv[1])
usual = resource.getrlimit(which)
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(which, (int(sys.argv[2]), usual[1]))
try:
    Region(1 << 40)
except Refused as error:
    resource.setrlimit(which, usual)
    print(len(os.listdir("/proc/self/fd")) - before, error)
"""


@pytest.mark.process
@pytest.mark.parametrize(("limit", "value"), [("AS", 1 << 32), ("FSIZE", 1 << 20), ("NOFILE", 3)])
def test_no_region_beyond_what_the_process_may_have(limit: str, value: int) -> None:
    """The error says what the kernel did not give and what to do, and no descriptor is left over."""
    command = [sys.executable, "-c", LIMITED, limit, str(value)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    left_over, _, error = done.stdout.partition(" ")
    assert left_over == "0"
    assert "to share" in error
    assert ";" in error


def test_what_is_borrowed_is_read_as_it_is() -> None:
    """A store sees what the writer has written up to now, and lets go of the descriptor."""
    before = files_open()
    region = Region(8192)
    borrowed = Borrowed(os.dup(region.fd), 8192)
    target = bytearray(5_000)
    region.view[:4], region.view[8_188:] = b"data", b"last"
    borrowed.copy(memoryview(target)[:4], 0)
    borrowed.copy(memoryview(target), 3_192)
    assert target[-4:] == b"last"
    region.view[:4] = b"more"
    borrowed.copy(memoryview(target), 0)
    assert target[:4] == b"more"
    borrowed.close()
    with pytest.raises(Refused, match="size"):
        Borrowed(os.dup(region.fd), 4_096)
    region.close()
    del region  # its mapping has a descriptor of its own
    assert files_open() == before


def test_what_cannot_be_read_is_said() -> None:
    """A store that finds less than was promised refuses; it copies nothing from elsewhere."""
    region = Region(4096)
    borrowed = Borrowed(os.dup(region.fd), 4096)
    with pytest.raises(Refused, match="cannot read"):
        borrowed.copy(memoryview(bytearray(10)), 4_090)
    borrowed.close()
    region.close()
