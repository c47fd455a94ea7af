"""Experiment files: what they say, what is refused and how, and the Chaos Toolkit's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvops
from kvops.chaos.experiment import (
    Experiment,
    differences,
    json_schema,
    load,
    parse,
    seconds,
    size_bytes,
    substitute,
)
from kvops.errors import ConfigError

EXPERIMENTS = Path(kvops.__file__).parents[1] / "playbooks" / "experiments"

GOOD = """
title: one store pauses
description: a gray failure
configuration: {pause_s: 8}
method:
  - type: action
    name: pause
    provider: {type: python, module: kvops.chaos.faults, func: process_pause, arguments: {target: store-1}}
kvops:
  deadlines: {fault: "${pause_s}"}
"""


def test_variables_keep_their_type() -> None:
    """A whole ``${name}`` becomes the value itself, so a number stays a number."""
    experiment = parse(GOOD, source="x")

    assert experiment.ours.deadlines.fault == 8
    assert [(call.name, call.target) for call in experiment.faults] == [("process.pause", "store-1")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title: x\ndescription: y\nkvops: {scop: {}}", "did you mean scope?"),
        ("title: x\ndescription: y\nkvops: {workload: {rsp: 3}}", "did you mean rps?"),
        ("title: x\ndescription: y\nmethod: [{provder: {}}]", "did you mean provider?"),
        ("title: x\ndescription: y\nkvops: {deadlines: {fault: soon}}", "fault"),
        (
            "title: x\ndescription: y\nkvops: {deadlines: {fault: '${pauze}'}}",
            "${pauze} is not in configuration",
        ),
        ("title: x", "description"),
        ("title: [", "not YAML"),
        ("- 1", "holds no experiment"),
        ("title: x\ndescription: y\nkvops: {workload: {windows: 0x10s}}", "windows"),
        ("title: x\ndescription: y\nkvops: {schema: 2}", "schema"),
    ],
)
def test_mistakes_are_named(text: str, says: str) -> None:
    """Whatever is wrong is refused as the file's fault, with the place and the nearest name."""
    with pytest.raises(ConfigError) as caught:
        parse(text, source="bad.yaml")

    assert says in caught.value.what
    assert caught.value.what.startswith("bad.yaml")


def test_all_misspelt_keys_at_once() -> None:
    """Two mistakes are both named: nobody corrects a file key by key."""
    with pytest.raises(ConfigError) as caught:
        parse("title: x\ndescription: y\nkvops: {scop: {}, worklod: {}}", source="bad.yaml")

    assert "scop" in caught.value.what
    assert "worklod" in caught.value.what


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine it says nothing
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=10,
    )
)
def test_any_yaml_gives_an_experiment_or_an_error(value: Any) -> None:
    """Whatever a file holds, it is read or refused, and never a bug of ours."""
    try:
        found = parse(yaml.safe_dump(value), source="x")
    except ConfigError:
        return
    assert isinstance(found, Experiment)


@pytest.mark.parametrize(
    ("text", "value"), [("500ms", 0.5), ("10s", 10), ("2m", 120), ("1.5h", 5400), (3, 3.0)]
)
def test_durations(text: str | float, value: float) -> None:
    """Durations are seconds, whatever unit they were written in."""
    assert seconds(text) == value


@pytest.mark.parametrize(("text", "value"), [("0B", 0), ("32KiB", 32768), ("1GiB", 1 << 30)])
def test_sizes(text: str, value: int) -> None:
    """Sizes are bytes, whatever unit they were written in."""
    assert size_bytes(text) == value


def test_substitution_inside_text() -> None:
    """Inside other text a variable is its text."""
    assert substitute({"a": ["${x}s", "${x}"]}, {"x": 5}) == {"a": ["5s", 5]}


FOREIGN = """
title: chaos toolkit's own
description: written for somebody else
steady-state-hypothesis:
  title: up
  probes:
    - {type: probe, name: up, tolerance: 200, provider: {type: http, url: "http://127.0.0.1/"}}
method:
  - {type: action, name: stop, timeout: 3, provider: {type: process, path: systemctl, arguments: stop x}}
rollbacks:
  - {type: action, name: start, provider: {type: process, path: systemctl, arguments: start x}}
controls:
  - {name: c, provider: {type: python, module: a.b}}
runtime: {rollbacks: {strategy: deviated}}
"""


def test_a_foreign_file_is_read_and_its_differences_are_named() -> None:
    """A file of the Chaos Toolkit is imported; what we would do otherwise is said."""
    experiment = parse(FOREIGN, source="x")

    text = "\n".join(differences(experiment))
    assert experiment.foreign
    assert not experiment.faults
    for word in (
        "no kvops: block",
        "systemctl is not called",
        "timeout is enforced",
        "rollbacks",
        "controls",
        "strategy deviated",
    ):
        assert word in text


def test_our_own_file_has_no_differences() -> None:
    """What is written for kvops means what it says."""
    assert differences(parse(GOOD, source="x")) == []


def test_the_published_schema_is_that_of_the_types() -> None:
    """Editors check files against the schema that reads them (make it again: kvops chaos validate --schema)."""
    assert json.loads((EXPERIMENTS / "schema.json").read_text()) == json_schema()


def test_load_names_a_missing_file(tmp_path: Path) -> None:
    """A wrong path is the caller's mistake, and named."""
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        load(tmp_path / "no.yaml")
