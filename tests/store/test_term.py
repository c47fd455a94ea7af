"""A master's term outlives everything."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ConfigError, Refused
from kvops.store.term import TERM_MAX, note_term, raise_term, read_term


def test_every_start_has_a_term_of_its_own(tmp_path: Path) -> None:
    """Terms begin at 1 and only grow, beyond whatever others were seen to use."""
    assert read_term(tmp_path) == 0
    first = raise_term(tmp_path)
    assert raise_term(tmp_path) == first + 1
    assert raise_term(tmp_path, at_least=first + 8) == first + 8
    assert raise_term(tmp_path, at_least=5) == first + 9
    assert read_term(tmp_path) == first + 9


def test_a_directory_that_was_lost_gives_no_term_twice(tmp_path: Path) -> None:
    """A store that was away when the terms were lost comes back with generations of before: none is given again."""
    before = raise_term(tmp_path)
    (tmp_path / "term.json").unlink()

    assert raise_term(tmp_path) >= before > 1_000_000


@given(content=st.binary())
def test_a_damaged_file_is_never_guessed_at(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Whatever the file holds is a term or one clear error, never a start from zero."""
    directory = tmp_path_factory.getbasetemp()
    (directory / "term.json").write_bytes(content)

    with pytest.raises(ConfigError, match="damaged"):
        raise_term(directory)


@pytest.mark.parametrize(
    "content", ['{"schema":1,"term":-1}', '{"schema":2,"term":1}', '{"schema":1,"term":16777216}']
)
def test_terms_that_cannot_be(tmp_path: Path, content: str) -> None:
    """A term out of range, or of another format, is an error."""
    (tmp_path / "term.json").write_text(content)

    with pytest.raises(ConfigError, match="damaged"):
        read_term(tmp_path)


def test_an_unfinished_write_changes_nothing(tmp_path: Path) -> None:
    """A crash before the new file was put in place leaves the old term, and the next start works."""
    term = raise_term(tmp_path)
    (tmp_path / "term.json.new").write_bytes(b'{"sch')

    assert raise_term(tmp_path) == term + 1


def test_there_is_a_last_term(tmp_path: Path) -> None:
    """A generation has room for so many terms; beyond it no master starts."""
    assert raise_term(tmp_path, at_least=TERM_MAX) == TERM_MAX
    with pytest.raises(Refused):
        raise_term(tmp_path)


def test_no_place_to_keep_it(tmp_path: Path) -> None:
    """Without a directory to keep the term in, there is no term."""
    with pytest.raises(ConfigError, match="cannot be kept"):
        raise_term(tmp_path / "missing")


def test_a_term_that_etcd_gave_is_noted_as_it_is(tmp_path: Path) -> None:
    """A fresh directory remembers the group's term, not a higher one that the clock would suggest."""
    note_term(tmp_path, 3)

    assert read_term(tmp_path) == 3
