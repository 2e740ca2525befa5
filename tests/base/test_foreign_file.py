"""Files of anybody: what is no record is a line that names it, and nothing waits or overflows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.base.foreign_file import MOST_BYTES, read_text, read_yaml
from harness.core.job import Job
from harness.core.record import Record, read_all
from tests.support.records import record
from tests.support.tiny import TINY

WHOLE = record(Job("resident", TINY)).to_dict()


@pytest.mark.parametrize(
    "text",
    ["null", "[1]", "5", "{}", "", "\0", "[" * 200_000, '{"schema_version": ' * 50 + "1" + "}" * 50]
    + [json.dumps(WHOLE | {"started": 0}).replace('"started": 0', f'"started": {value}')
       for value in ("x", '"x"', "1" + "0" * 400, "1e400", "NaN", "-Infinity", "[[]]")],
)  # fmt: skip
def test_what_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "log_a.json").write_text(text)
    records, (complaint,) = read_all(tmp_path)
    assert not records and complaint.startswith(f"{tmp_path}/log_a.json is not a record: ") and "\n" not in complaint


@pytest.mark.parametrize(
    "part",
    [{"tensors": {"a": {"changed": 1.0}}}, {"tensors": {"a": {"changed": 1.0, "moved": "far"}}},
     {"machine": {"cores": "two"}}, {"schedule": {"num_models": None}}, {"gate": {"evidence": {"reference": []}}},
     {"others": [{}]}, {"evidence": {"unsaid": 5}}],
)  # fmt: skip
def test_a_part_of_another_type_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(part))):
        Record.from_dict(WHOLE | part)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log_a.json").symlink_to("/proc/self/environ")
    (complaint,) = read_all(tmp_path)[1]
    assert complaint.endswith("expected a regular file, got a symbolic link: " + repr(str(tmp_path / "log_a.json")))


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
    ['a: "\\U99999999999"', "a: 2022-99-99", "[" * 100_000, "a: !!python/object:os.system {}", "a: &a [*a]",
     "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'a'] * 9)}]" for n in range(30))],
    ids=range(6),
)  # fmt: skip
def test_yaml_that_no_person_wrote_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "some.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_yaml(tmp_path / "some.yaml")
    assert str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_of_a_records_name_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "log_a.json").mkdir()
    (complaint,) = read_all(tmp_path)[1]
    assert complaint.endswith("expected a regular file, got another kind: " + repr(str(tmp_path / "log_a.json")))


def test_half_a_character_is_read_as_its_escape(tmp_path: Path) -> None:
    (tmp_path / "log_a.json").write_text(json.dumps(WHOLE | {"reason": "\ud800 \U0001f600"}))
    assert Record.read(tmp_path / "log_a.json").reason == "\\ud800 \U0001f600"
