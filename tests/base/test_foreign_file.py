"""Files of anybody: what is no record is a line that names it, and nothing waits or overflows."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.base.foreign_file import MOST_BYTES, read_text, read_yaml
from harness.core import anatomy
from harness.core.job import Job
from harness.core.record import Record, read_all
from tests.support.configured import config_of, configured
from tests.support.records import record, write
from tests.support.tiny import TINY

WHOLE = record(Job("resident", TINY)).to_dict()


@pytest.mark.parametrize(
    "text",
    ["null", "[1]", "5", "{}", "", "\0", "[" * 200_000, '{"schema_version": ' * 50 + "1" + "}" * 50]
    + [
        json.dumps(WHOLE | {"started": 0}).replace('"started": 0', f'"started": {value}')
        for value in ("x", '"x"', "1" + "0" * 400, "1e400", "NaN", "-Infinity", "[[]]")
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "log_a.json").write_text(text)
    records, (complaint,) = read_all(tmp_path)
    assert (
        not records
        and complaint.startswith(f"{tmp_path}/log_a.json is not a record: ")
        and "\n" not in complaint
    )


@pytest.mark.parametrize(
    "part",
    [
        {"tensors": {"a": {"changed": 1.0}}},
        {"tensors": {"a": {"changed": 1.0, "moved": "far"}}},
        {"machine": {"cores": "two"}},
        {"schedule": {"num_models": None}},
        {"gate": {"evidence": {"reference": []}}},
        {"others": [{}]},
        {"evidence": {"unsaid": 5}},
    ],
)
def test_a_part_of_another_type_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(part))):
        Record.from_dict(WHOLE | part)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log_a.json").symlink_to("/proc/self/environ")
    (complaint,) = read_all(tmp_path)[1]
    assert complaint.endswith(
        "expected a regular file, got a symbolic link: " + repr(str(tmp_path / "log_a.json"))
    )


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "log_a.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(OSError, match=f"expected at most {MOST_BYTES} bytes, got {MOST_BYTES + 1}"):
        read_text(tmp_path / "log_a.json")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="expected a regular file"):
        read_text(tmp_path / "pipe")


@pytest.mark.parametrize(
    "text",
    [
        'a: "\\U99999999999"',
        "a: 2022-99-99",
        "[" * 100_000,
        "a: !!python/object:os.system {}",
        "a: &a [*a]",
        "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'a'] * 9)}]" for n in range(30)),
        "\n".join(
            f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" if n else "a0: &a0 {b: c}"
            for n in range(30)
        ),
        f"a: &a [{'b, ' * 1000}]\nc: [{'*a, ' * 20_000}]",
    ],
    ids=range(8),
)
def test_yaml_that_no_person_wrote_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "some.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_yaml(tmp_path / "some.yaml")
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["[{}]", "{{<<: [{}]}}"])
def test_yaml_that_repeats_itself_too_often_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    lines = [f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, 30)]
    (tmp_path / "some.yaml").write_text("\n".join(["a0: &a0 {b: c}", *lines]))
    monkeypatch.setattr(yaml, "load", pytest.fail)
    with pytest.raises(ValueError, match="40 nested levels and 100000 values, got more"):
        read_yaml(tmp_path / "some.yaml")


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": "64"},
        {"hidden_size": "32"},
        {"head_dim": [8]},
        {"model_type": "nonsense"},
        {"rms_norm_eps": "small"},
    ],
)
def test_a_record_of_a_model_without_sizes_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    def refuse(module: str, arguments: Any) -> Any:
        raise ValueError(f"{module} failed: no such model")

    monkeypatch.setattr(anatomy, "ask", refuse)
    job = {**WHOLE["job"], "workload": dataclasses.asdict(configured("mistral", learning_rate=1e-3))}
    job["workload"]["config"] = json.dumps(config_of("mistral", **changes))
    write(tmp_path, record(Job("resident", TINY)))
    (tmp_path / "log_a.json").write_text(json.dumps(WHOLE | {"job": job}))
    records, (complaint,) = read_all(tmp_path)
    assert len(records) == 1 and complaint.startswith(f"{tmp_path}/log_a.json is ") and "\n" not in complaint


def test_a_record_of_another_model_whose_sizes_are_texts_is_named(tmp_path: Path) -> None:
    other = {"workload": {"num_layers": "many"}, "losses": [1.0], "grad_norms": [], "tensors": {}}
    (tmp_path / "log_a.json").write_text(json.dumps(WHOLE | {"others": [other]}))
    records, (complaint,) = read_all(tmp_path)
    assert not records and complaint.startswith(f"{tmp_path}/log_a.json is left out: ")


def test_a_folder_of_a_records_name_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "log_a.json").mkdir()
    (complaint,) = read_all(tmp_path)[1]
    assert complaint.endswith(
        "expected a regular file, got another kind: " + repr(str(tmp_path / "log_a.json"))
    )


def test_half_a_character_is_read_as_its_escape(tmp_path: Path) -> None:
    (tmp_path / "log_a.json").write_text(json.dumps(WHOLE | {"reason": "\ud800 \U0001f600"}))
    assert Record.read(tmp_path / "log_a.json").reason == "\\ud800 \U0001f600"
