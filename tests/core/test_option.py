"""Options as fields: a field that declares a flag is an option of the calls, and is in the calls that repeat a job."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass

import click
import pytest

from cli import job_verbs
from cli.advise import advise
from cli.options import of_field
from harness.core import method
from harness.core.job import Budget, Job, Workload
from harness.core.option import Option, opt, options_of, unsaid_of, with_option
from harness.jobs.command import command_of
from tests.core.test_job import WORKLOAD_CHANGES

DEPTH = Option(("--depth",), "Depth.")


@dataclass(frozen=True)
class Declared:
    width: int = opt(3, "-w", "--width", "Width.", metavar="N")
    depth: int = with_option(2, DEPTH)
    tag: str | None = opt(None, "--tag", "Label.", is_unsaid=True)
    other: int = 1


def flags_of(verb: object) -> set[str]:
    return {flag for parameter in verb.params for flag in parameter.opts}  # type: ignore[attr-defined]


def test_a_field_has_its_default_and_its_option() -> None:
    assert Declared() == Declared(3, 2, None, 1)
    assert options_of(Declared)["width"] == Option(("-w", "--width"), "Width.", "N")
    assert options_of(Declared)["depth"] is DEPTH and list(options_of(Declared)) == ["width", "depth", "tag"]
    assert unsaid_of(Declared) == {"tag": None}


def test_the_verbs_have_the_option_of_each_field() -> None:
    workload = {flag for option in options_of(Workload).values() for flag in option.flags}
    budget = {flag for option in options_of(Budget).values() for flag in option.flags}
    methods = {flag for option in method.flags().values() for flag in option.flags}
    assert workload | budget | methods <= flags_of(job_verbs.run)
    assert workload <= flags_of(advise)


@pytest.mark.parametrize("name", sorted(options_of(Workload).keys() - {"weights", "lora_targets"}))
def test_a_printed_call_has_the_flag_of_each_field_that_differs(name: str) -> None:
    value = WORKLOAD_CHANGES[name]
    workload = Workload(**{"batch_size": 2 * Workload.batch_size, name: value})
    arguments = shlex.split(command_of(Job("l2l", workload), is_short=True))
    flag = options_of(Workload)[name].flag
    assert arguments[arguments.index(flag) + 1] == str(value)


def test_fields_that_jobs_did_not_always_have_are_left_out_of_their_json() -> None:
    unsaid = unsaid_of(Workload)
    assert {"micro_batches", "weights", "lr_warmup_steps"} <= unsaid.keys()
    job = Job("l2l", Workload())
    assert job.to_dict()["workload"].keys() == {*vars(Workload())} - unsaid.keys()
    more = dataclasses.replace(job, workload=Workload(micro_batches=2)).to_dict()
    assert more["workload"]["micro_batches"] == 2 and Job.from_dict(more).workload.micro_batches == 2


def test_an_option_may_be_declared_in_a_file_whose_annotations_are_no_texts() -> None:
    kind = dataclasses.make_dataclass("Evaluated", [("host", str | None, opt(None, "--host", "Machine."))])
    option = click.Command("verb", params=[click.Option(["--of"])])
    of_field(kind, "host")(option)
    assert [parameter.type for parameter in option.params if parameter.name == "host"] == [click.STRING]
