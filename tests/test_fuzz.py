"""Records, machines, requests to Slurm, corpora and words of a call that nobody meant: used, or refused in one line."""

from __future__ import annotations

import functools
import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cli.job_verbs import VERBS as JOB_VERBS
from cli.result_verbs import VERBS as RESULT_VERBS
from harness.core import data, identity
from harness.core.job import Budget, Job, Workload
from harness.core.record import Gate, Record
from harness.devices import named_machines
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from papers.claims import claims
from papers.figures.points import load_frame
from papers.report import bundle
from places import slurm
from places.shared.cluster import PLAIN_TEXT, place_options
from tests.support import cli, records
from tests.support.fuzz import TEXTS, broken, changed, fuzzed, texts
from tests.support.tiny import TINY, WORDS

pytestmark = pytest.mark.heavy
CODES = (0, 1, 2, 3, 4, 5, 7)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Nothing trains, and what is the same for all examples is read once."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("it would train")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("launch", "prepare"):
            patch.setattr(f"harness.jobs.sweep.{name}", refuse)
        for module, name in ((named_machines, "load"), (claims, "load_claims"), (identity, "source_hash")):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


def ends_well(*words: object) -> None:
    """The call ends in a known code, and tells a mistake in one line."""
    done = cli.run(*words)
    assert done.returncode in CODES, done
    if done.returncode == 2:
        assert done.stderr.split("\n")[-2].startswith("error: "), done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "Traceback" not in done.stderr


# ---- Records

TENSOR = {"changed": 1.0, "moved": 0.5, "size": 2.0, "sketch": [0.5, 0.25], "exp_avg": 1.0, "sha256": "ab"}
MACHINE = {
    "cpu": "Some CPU",
    "cores": 2,
    "host_bytes": 2**33,
    "gpu_bytes": 2**34,
    "load_average": 0.5,
    "nodes": "a[1-2]",
}


@functools.cache
def whole(folder: Path) -> dict[str, Any]:
    """A record as a call here and now would find it, beside the one of its reference."""
    found = []
    for name in ("l2l", "resident"):
        job = resolve(Job(name, TINY, steps=6, warmup=1, budget=Budget(host_bytes=2**33)))[0]
        evidence = {"reference": "key", "loss_difference": 0.0}
        made = records.record(
            job,
            key=Sweep(folder).key(job),
            tensors={"w": TENSOR},
            machine=MACHINE,
            software={"torch": "2"},
            peaks={"host_anonymous": 2**20, "device_allocated": 2**10},
            kernels=["flash"],
            phase_seconds={"import": 1.0},
            grad_norms=[1.0] * 6,
            description={"implementation": "torch"},
            data_sha256="ab" * 32,
            clock="cpu",
            gate=Gate("exact", "", "bit-equal", evidence),
            predicted={"device_bytes": 1},
            limits={"host": "rlimit"},
        )
        made.write(folder / f"log_{name}.json")
        found.append(made.to_dict())
    return found[0]


@fuzzed
@given(choice=st.data())
def test_a_record_of_anybody_is_used_or_named(
    choice: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "records"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():  # of the example before
        if path.name not in ("log_l2l.json", "log_resident.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    made = choice.draw(changed(whole(folder)))
    text = json.dumps(made).encode(errors="replace")
    text = choice.draw(broken(text)) if choice.draw(st.integers(0, 4)) == 0 else text
    (folder / "log_l2l.json").write_bytes(text)
    try:
        kept = Record.read(folder / "log_l2l.json")
    except ValueError as error:
        assert str(error).startswith(str(folder))
        return
    assert Record.from_dict(kept.to_dict()).key == kept.key and len(load_frame(folder)) == 2
    bundle.known_words([kept])
    words = ["--results", folder]
    ends_well("fairness", *words)
    ends_well("compare", "l2l", "resident", *words)
    ends_well(*WORDS, "-m", "l2l", "--steps", 6, "--warmup", 1, "--host-memory", "8GiB", *words)
    if zlib.crc32(text) % 16 == 0:
        ends_well("verify", *words)
        ends_well("case", "3", "--profile", "demo", "--extract", "--out", folder / "figures", *words)
    if zlib.crc32(text) % 256 == 0:
        ends_well("report", *words)
        ends_well("bundle", *words)


# ---- YAML

MACHINES = yaml.safe_load(named_machines.FILE.read_text())
REQUEST = {"partition": "gpu", "time": 30, "nodes": 1, "gpus": 2, "cpus": 4, "qos": "high", "account": "me"}


def as_yaml(choice: st.DataObject, whole: Any) -> bytes:
    text = yaml.safe_dump(choice.draw(changed(whole))).encode(errors="replace")
    return choice.draw(st.just(text) | broken(text))


@fuzzed
@given(choice=st.data())
def test_an_entry_of_machines_is_a_budget_or_refused_in_a_line(
    choice: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "machines.yaml"
    file.write_bytes(as_yaml(choice, MACHINES))
    try:
        names = named_machines.names(file)
        for name in names:
            assert named_machines.Machine.budget_on(named_machines.load(name, file), "cpu")
    except ValueError as error:
        assert len(str(error).splitlines()) == 1


@fuzzed
@given(choice=st.data())
def test_a_request_to_slurm_is_plain_words_or_refused_in_a_line(
    choice: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "request.yaml"
    file.write_bytes(as_yaml(choice, REQUEST))
    try:
        words = (str(file), *choice.draw(st.lists(texts, max_size=1)))
        options = place_options("slurm", words, slurm.Options)
    except ValueError as error:
        assert str(error)
        return
    assert all(isinstance(value, int) or PLAIN_TEXT.fullmatch(value) for value in options.values())


# ---- Corpora

TOKENS = struct.pack("<40H", *range(40))
INDEX = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", 40, 0, 0, 1)


@fuzzed
@given(index=st.just(INDEX) | broken(INDEX), tokens=st.just(TOKENS) | broken(TOKENS))
def test_a_corpus_is_tokens_of_the_vocabulary_or_refused_in_a_line(
    index: bytes, tokens: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.getbasetemp() / "text"
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(tokens)
    try:
        found = data.batches(Workload(seq_len=8, batch_size=2, vocab_size=64, corpus=str(prefix)), 2)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert found.shape == (2, 2, 9) and found.min() >= 0 and found.max() < 64


# ---- Words of a call

VERBS = [
    verb
    for verb in (*JOB_VERBS, *RESULT_VERBS)
    if verb.name not in ("bundle", "report", "setup", "demo", "case", "verify")
]
OPTIONS = sorted(
    {word for verb in VERBS for each in verb.params for word in each.opts if word.startswith("-")}
)
# seconds of a rehearsal; a folder of one's own; other machines
LEFT_OUT = {"--exact", "--results", "--help", "--on"}


@st.composite
def calls(draw: st.DrawFn, folder: Path) -> list[str]:
    """A verb or none, options with values that they may have or not, in any order."""
    values = st.sampled_from(TEXTS).map(lambda text: text.replace("\0", "")) | st.just(str(folder))
    words = [
        draw(st.sampled_from(["run", "sweep", "plan", "fairness", "compare", "import", "search", "", "case"]))
    ]
    words += draw(
        st.sampled_from([["largest"], ["-m", "stronghold"], ["-m", "all"], WORDS, ["1", "--extract"], []])
    )
    for _ in range(draw(st.integers(0, 3))):
        words.append(draw(st.sampled_from([each for each in OPTIONS if each not in LEFT_OUT])))
        words += draw(st.lists(values, max_size=2))
    return [word for word in words if word]


@fuzzed
@given(choice=st.data())
def test_words_that_nobody_meant_end_in_a_known_code(
    choice: st.DataObject, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.getbasetemp() / "words"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    ends_well(*choice.draw(calls(folder)), *choice.draw(st.sampled_from([[], ["--results", folder]])))
