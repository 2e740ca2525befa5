"""Files of claims: what they may say, and that whatever they say ends in claims or in one line; the verb verify."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from harness.devices import named_machines
from papers.claims import claims, judge, verify
from papers.figures import case
from tests.cli.test_main import run
from tests.support import records
from tests.support.fuzz import fuzzed
from tests.support.records import write

TEXT = (claims.FOLDER / "stronghold.yaml").read_text()
HEAD = """
claims:
  - id: one
    text: A is faster than B.
    source: Figure 0
    case: 3
    metric: samples_per_second
    machines: [gpu]
"""
RATIO = "    kind: ratio\n    over: stronghold\n    under: l2l\n    at_least: 2\n"
SHAPE = "    kind: shape\n    of: stronghold\n    against: num_layers\n"


def load(folder: Path, text: str | bytes) -> list[claims.Claim]:
    path = folder / "some.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return claims.load_claims(folder)


def test_every_claim_of_this_project_has_its_source_and_every_case_has_claims() -> None:
    all_claims = claims.load_claims()
    assert {claim.case for claim in all_claims} == set(case.numbers_of_all())
    assert all(any(word in claim.source for word in ("Figure", "README", "abstract")) for claim in all_claims)


def test_a_claim_is_what_its_file_says(tmp_path: Path) -> None:
    point = "{method: stronghold, num_layers: 32, window_size: largest}"
    (claim,) = load(tmp_path, HEAD + RATIO.replace("over: stronghold", f"over: {point}"))
    expected = claims.Ratio(
        claims.Point("stronghold", 32, None, "largest"), claims.Point("l2l"), at_least=2.0
    )
    assert (claim.id, claim.case, claim.machines, claim.expected) == ("one", 3, ("gpu",), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "one key, claims"),
        ("claims: {}", "one key, claims"),
        ("claims: [", "is not a file of claims"),
        ("claims: [3]", "claim 1: expected a mapping of fields, got '3'"),
        ("claims: [{}]", "claim 1: kind: expected one of order, ratio, shape, value, got None"),
        (HEAD.replace("id: one\n    ", "") + RATIO, "claim 1: id is missing"),
        (HEAD, "claim one: kind: expected one of order, ratio, shape, value, got None"),
        (HEAD + "    kind: ratios", "kind: expected one of order, ratio, shape, value, got 'ratios'"),
        (
            HEAD.replace("id: one", "id: One") + RATIO,
            "claim 1: id: expected small letters, digits, dots and dashes",
        ),
        (HEAD.replace("    source: Figure 0\n", "") + RATIO, "claim one: source is missing"),
        (
            HEAD.replace("case: 3", "case: 99") + RATIO,
            "case: expected one of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, got 99",
        ),
        (
            HEAD.replace("[gpu]", "[h200]") + RATIO,
            "expected one of any, gpu, several-gpus, v100-vm, got 'h200'",
        ),
        (HEAD.replace("samples_per_second", "speed") + RATIO, "metric: expected one of params"),
        (HEAD + RATIO.replace("l2l", "l3l"), "under.method: expected one of"),
        (HEAD + RATIO + "    at_most: 3\n", "exactly one of the fields at_least, at_most, within"),
        (
            HEAD + RATIO.replace("at_least: 2", "within: [2, 1]"),
            "within: expected a range [low, high] with low < high, got (2.0, 1.0)",
        ),
        (
            HEAD + RATIO.replace("at_least: 2", "within: [1, 2, 3]"),
            "within: expected at most 2 items, got ['1', '2', '3']",
        ),
        (
            HEAD + RATIO.replace("at_least: 2", "at_least: two"),
            "at_least: expected a valid number, got 'two'",
        ),
        (HEAD + RATIO.replace("at_least: 2", "at_least: -2"), "at_least: expected greater than 0, got '-2'"),
        (HEAD + RATIO.replace("at_least: 2", "at_least: .nan"), "expected a valid number, got '.nan'"),
        (HEAD + RATIO + "    xfail: ''\n", "xfail: expected text, got ''"),
        (
            HEAD + RATIO.replace("l2l", "{method: l2l, num_layers: 1_000}"),
            "expected a positive integer, got '1_000'",
        ),
        (
            HEAD + RATIO + "    tolerance: 0.1\n",
            "'tolerance': expected one of the fields over, under, at_least",
        ),
        (
            HEAD + RATIO.replace("over: stronghold", "over: {method: l2l, window_size: 0}"),
            "expected a positive integer, largest or smallest",
        ),
        (HEAD + "    kind: order\n    points: [l2l]\n", "points: expected two or more points, highest first"),
        (
            HEAD + "    kind: order\n    points: [l2l, []]\n",
            "points: expected two or more points, highest first",
        ),
        (HEAD + SHAPE, "exactly one of the fields exponent, plateau"),
        (
            HEAD + SHAPE + "    plateau: {gain: 0.1, num_points: 1}\n",
            "plateau.num_points: expected greater than 1, got '1'",
        ),
        (
            HEAD + "    kind: value\n    of: l2l\n    value: 3\n    tolerance: 0.1\n",
            "machines: expected [v100-vm]",
        ),
        (HEAD + RATIO + HEAD.replace("\nclaims:\n", "") + RATIO, "claim one: the id is taken"),
    ],
)
def test_a_bad_file_is_one_line_that_names_file_claim_and_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    line = str(caught.value)
    assert str(tmp_path) in line and message in line and "\n" not in line


WORDS = [
    b"",
    b" ",
    b"\n",
    b"  - ",
    b": ",
    b"[",
    b"]",
    b"{",
    b"}",
    b"&a ",
    b"*a",
    b"!!int ",
    b"!!python/object:os.system ",
    b"<<: ",
    b"? ",
    b"|\n",
    b">",
    b"#",
    b"'",
    b'"',
    b"\t",
    b"\xff",
    b"\x00",
    b"\xe2\x80\xa8",
    b"9" * 5000,
    b"1e999",
    b"-0",
    b".nan",
    b".inf",
    b"~",
    b"no",
    b"2022-99-99",
    b"num_layers",
    b"window_size: largest",
    b"params",
    b"[0.1, 0.2]",
    b"{method: l2l}",
    b"[" * 2000,
    b"within",
    b"kind: value",
    b"kind: order",
    b"0x10",
    b"1_000",
]


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    """The project's file, or a short one, with pieces of it replaced, doubled, swapped or left out."""
    data = draw(
        st.sampled_from([TEXT, HEAD + RATIO, HEAD + SHAPE + "    plateau: {gain: 0.05, num_points: 3}\n"])
    ).encode()
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 40)))
        other = draw(st.integers(0, len(data)))
        piece = draw(
            st.one_of(st.sampled_from(WORDS), st.just(data[other : other + 60]), st.binary(max_size=4))
        )
        data = data[:start] + piece + data[stop:]
    return data


KEYS = [
    "id",
    "kind",
    "over",
    "under",
    "of",
    "against",
    "points",
    "within",
    "at_least",
    "exponent",
    "plateau",
    "value",
    "tolerance",
    "method",
    "num_layers",
    "window_size",
    "metric",
    "machines",
    "xfail",
    "case",
]
TEXTS = [
    "stronghold",
    "l2l",
    "megatron-lm",
    "zero-offload",
    "largest",
    "smallest",
    "window_size",
    "num_layers",
    "any",
    "v100-vm",
    "params",
    "step_seconds",
    "samples_per_second",
    "order",
    "ratio",
    "shape",
    "value",
    "1",
    "2",
    "15",
    "32",
    "0.001",
    "1e300",
    "-1",
    "",
]
VALUES = st.recursive(
    st.sampled_from(TEXTS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated_claims(draw: st.DrawFn) -> bytes:
    """A few of the project's claims with fields replaced, added or left out: still YAML, so that it goes further."""
    all_claims = yaml.load(TEXT, Loader=yaml.BaseLoader)["claims"]
    chosen = draw(
        st.lists(st.sampled_from(all_claims), min_size=1, max_size=3, unique_by=lambda claim: claim["id"])
    )
    chosen = json.loads(json.dumps(chosen))
    for _ in range(draw(st.integers(1, 3))):
        claim = draw(st.sampled_from(chosen))
        field = draw(st.sampled_from([*claim, *KEYS]))
        other = draw(st.sampled_from(all_claims))
        kind = draw(st.sampled_from(["replace", "leave out", "take from another", "become another"]))
        if kind == "replace":
            claim[field] = draw(VALUES)
        elif kind == "leave out":
            claim.pop(field, None)
        elif kind == "take from another" and field in other and field != "id":
            claim[field] = other[field]
        else:  # another's question, to this one's case, metric and machines
            fields = (
                "kind",
                "over",
                "under",
                "of",
                "against",
                "points",
                "within",
                "at_least",
                "exponent",
                "plateau",
            )
            kept = {key: value for key, value in claim.items() if key not in fields}
            claim.clear()
            claim |= {**kept, **{key: value for key, value in other.items() if key in fields}}
    return json.dumps({"claims": chosen}).encode()


@pytest.mark.heavy
@fuzzed
@given(data=st.one_of(mutated_bytes(), mutated_claims()))
def test_a_mutated_file_is_claims_that_can_be_judged_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    (folder / "some.yaml").write_bytes(data)
    try:
        findings = verify.findings(folder, judge.PUBLISHED, None, folder)
    except ValueError as error:
        assert str(folder) in str(error) and len(str(error).splitlines()) == 1
        return
    for finding in findings:
        json.loads(json.dumps(finding.to_dict()))
    verify.closing_lines(findings)


# ---- The verb


def record(method: str, seconds: float, machine: str, **options: object) -> Record:
    job = Job(method, Workload(num_layers=32), options, device="cuda", steps=3, warmup=1)
    return records.record(
        job,
        seconds,
        key=f"{method} {machine}",
        origin="imported",
        clock="cuda",
        machine={"gpu": machine},
        gate=Gate("tolerance"),
    )


def test_verify_judges_the_original_and_ends_in_1() -> None:
    done = run("verify", "--against", "published")
    assert done.returncode == 1 and done.stderr == ""
    assert "PASS: 5 of 51: 6a.megatron" in done.stdout
    assert "rests on a run that did not train" in done.stdout and "no plateau" in done.stdout


def test_verify_of_nothing_names_the_commands_and_ends_in_0(tmp_path: Path) -> None:
    done = run("verify", "--results", str(tmp_path), "--json")
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and {one["verdict"] for one in findings} == {
        judge.NOT_TESTED,
        judge.OTHER_MACHINE,
    }
    untested = [one for one in findings if one["verdict"] == judge.NOT_TESTED]
    assert all(one["note"].startswith("./run.sh case ") for one in untested)


def test_imported_logs_are_judged_at_the_points_that_were_published(tmp_path: Path) -> None:
    """0.7496 samples/s published for Megatron-LM: 5.34 s a step of 4 are 0.749, 6 s are 0.667."""
    narrow = dataclasses.replace(record("stronghold", 20.0, "", window_size=2), key="another", started=9.0)
    write(tmp_path, record("megatron-lm", 5.34, ""), record("stronghold", 6.0, "", window_size=15), narrow)
    findings = {one.claim.id: one for one in verify.findings(tmp_path, None, "v100-vm")}
    assert findings["8a.megatron-32"].verdict == "PASS"
    assert (
        findings["7a.faster-than-megatron"].verdict == "XFAIL"
        and "= 0.89 (" in findings["7a.faster-than-megatron"].values_text
    )
    unnamed = {one.claim.id: one for one in verify.findings(tmp_path, None, None)}
    assert unnamed["8a.megatron-32"].verdict == "N/A"


def test_imported_logs_do_not_count_where_something_was_measured_here(tmp_path: Path) -> None:
    """The same log passes alone, and is neither passed nor failed beside a run of ours."""
    log = record("megatron-lm", 5.34, "")
    run_here = dataclasses.replace(record("l2l", 1.0, "H200"), origin="run")
    alone = run("verify", "--results", str(write(tmp_path, log)), "--machine", "v100-vm")
    assert "Judged by imported logs: nothing of this was measured here" in alone.stdout
    assert "seen in the logs" in alone.stdout and "PASS: 2 of 51: 6a.megatron, 8a.megatron-32" in alone.stdout
    beside = run("verify", "--results", str(write(tmp_path, log, run_here)))
    assert "NOT TESTED: 47 of 51" in beside.stdout and "imported logs" not in beside.stdout
    assert beside.stderr.startswith("not judged beside runs measured here: 1 imported log;")
    assert len(beside.stderr.splitlines()) == 1


@pytest.mark.parametrize("device", ["sim", "cuda"])
def test_runs_under_the_papers_budgets_are_found_by_its_name(device: str) -> None:
    plain = dataclasses.replace(record("l2l", 1.0, "H200"), origin="run")
    budget = named_machines.load(claims.PAPER_MACHINE).budget_on(device)
    capped = dataclasses.replace(plain, job=dataclasses.replace(plain.job, budget=budget, device=device))
    assert verify.of_one_machine([plain, capped], claims.PAPER_MACHINE) == [capped]
    assert verify.of_one_machine([plain, capped], "h2") == [plain, capped]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--machine TPU", "no record of machine 'TPU': try --machine with one of ['A100', 'H200']"),
        ("", "expected runs of one machine, got runs of 2: try --machine with one of ['A100', 'H200']"),
        ("--results /nowhere", "no folder /nowhere: try --results with a folder of records"),
        ("--claims /nowhere", "/nowhere is not a file of claims"),
        ("--against nothing", "'nothing' is not 'published'"),
    ],
)
def test_a_bad_call_of_verify_is_one_line_and_exit_2(tmp_path: Path, options: str, message: str) -> None:
    runs = [dataclasses.replace(record("l2l", 1.0, name), origin="run") for name in ("A100", "H200")]
    done = run("verify", "--results", str(write(tmp_path, *runs)), *options.split())
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert message in done.stderr
