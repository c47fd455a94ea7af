"""Configuration files: what is read, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ConfigError
from kvops.files import dump_yaml, load_yaml, parse_yaml, read_secret, write_private, write_yaml
from kvops.store.config import MasterConfig, StoreConfig

MASTER = MasterConfig(group="local", secret_file="/s/secret", state_dir="/s/master-0")
STORE = StoreConfig(
    group="local", secret_file="/s/secret", state_dir="/s/store-0", masters=["127.0.0.1:7800"]
)


@pytest.mark.parametrize("config", [MASTER, STORE], ids=["master", "store"])
def test_round_trip(config: MasterConfig | StoreConfig, tmp_path: Path) -> None:
    """What is written is read back equal, so that a restarted member is the one it was."""
    write_yaml(tmp_path / "c.yaml", config)

    assert load_yaml(tmp_path / "c.yaml", type(config)) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lissten: 127.0.0.1:1", "unknown field `lissten`"),
        ("listen: nowhere", "listen: 'nowhere' is not an address"),
        ("listen: ::1:80", "is not an address"),
        ("http: 127.0.0.1:65536", "is not an address"),
        ("unix_path: relative.sock", "is not an absolute path"),
        (f"unix_path: /{'x' * 107}", "longer than 107 bytes"),
        ("eviction_high_watermark: 1.5", "eviction_high_watermark"),
        ("eviction_low_watermark: 0.99", "is not below"),
        ("objects_max: 0", "objects_max"),
        ("placement: nearest", "nearest"),
        ("name: ../../etc/passwd", "$.name"),
        ("group: [", "c.yaml:"),
    ],
)
def test_bad_master_file(change: str, words: str, tmp_path: Path) -> None:
    """Each mistake is named with the file and the place, not with a traceback."""
    path = tmp_path / "c.yaml"
    path.write_text(dump_yaml(MASTER).replace(f"{change.split(':')[0]}:", "#") + change + "\n")

    with pytest.raises(ConfigError) as caught:
        load_yaml(path, MasterConfig)

    assert words in caught.value.what
    assert str(path) in caught.value.what
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("masters", []),
        ("masters", ["x"]),
        ("segment_size_bytes", 1),
        ("huge_page_bytes", 4096),
        ("transports", ["udp"]),
        ("transports", []),
    ],
)
def test_bad_store_field(field: str, value: object) -> None:
    """A store without masters, memory or a way to read it is refused before it starts."""
    text = dump_yaml(STORE) + f"{field}: {value}\n"

    with pytest.raises(ConfigError, match=field):
        parse_yaml(text.encode(), StoreConfig, source="f")


def test_odd_segment() -> None:
    """A segment that is not whole pages is refused."""
    with pytest.raises(ValueError, match="multiple of 4096"):
        StoreConfig(
            group="g", secret_file="/s", state_dir="/d", masters=["h:1"], segment_size_bytes=(1 << 20) + 1
        )


def test_a_segment_of_broken_huge_pages() -> None:
    """A segment that is not whole huge pages is refused by the file, not by the kernel later."""
    with pytest.raises(ValueError, match="multiple of huge_page_bytes 2097152"):
        StoreConfig(
            group="g",
            secret_file="/s",
            state_dir="/d",
            masters=["h:1"],
            segment_size_bytes=3 << 20,
            huge_page_bytes=2 << 20,
        )


@pytest.mark.parametrize("what", ["missing", "folder", "huge"])
def test_unreadable_file(what: str, tmp_path: Path) -> None:
    """A file that cannot be a configuration is one clear error."""
    path = tmp_path / "c.yaml"
    if what == "folder":
        path.mkdir()
    elif what == "huge":
        path.write_bytes(b"#" * ((1 << 20) + 1))

    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_yaml(path, MasterConfig)


@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    """Whatever is in a file, it is a configuration or a ConfigError."""
    try:
        parse_yaml(raw, MasterConfig, source="f")
    except ConfigError:
        pass


def test_private_file(tmp_path: Path) -> None:
    """What we write is its owner's alone, replaces the former file whole, and leaves nothing beside it."""
    path = tmp_path / "secret"
    path.write_bytes(b"old")

    write_private(path, b"new")

    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("ab" * 32, 0o644, "others may read"),
        ("ab" * 31, 0o600, "64 hex digits"),
        ("not hex", 0o600, "64 hex digits"),
    ],
)
def test_bad_secret(content: str, mode: int, words: str, tmp_path: Path) -> None:
    """A secret that others can read, or that is none, is not used."""
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(mode)

    with pytest.raises(ConfigError, match=words):
        read_secret(path)


def test_secret(tmp_path: Path) -> None:
    """A good secret is 32 bytes, whatever white space ends its file."""
    write_private(tmp_path / "secret", b"ab" * 32 + b"\n")

    assert read_secret(tmp_path / "secret") == b"\xab" * 32
