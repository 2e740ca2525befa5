"""The shape of the code: names that say something, functions that fit on a screen."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from tests.test_packages import HOUSES

# Names that say nothing: the field's noun takes their place. Eight codebases of models use them 3 times in all.
EMPTY_NAMES = {
    "found",
    "each",
    "told",
    "words",
    "own",
    "asked",
    "made",
    "there",
    "ours",
    "given",
    "theirs",
    "here",
    "its",
    "some",
}
MOST_LINES = 40  # of a function, from def to end
MOST_PARAMETERS = 5  # of a function, besides self, cls, *args and **kwargs
# Functions that are longer, or take more, each with the reason.
LONGER = {
    "harness/run/launch.py::launch": "a run from its start to its record, in the order of time",
    "methods/engines/deepspeed.py::train": "a method's loop",
    "methods/fsdp2_offload.py::Fsdp2Offload.train": "a method's loop",
    "methods/stronghold.py::Stronghold.train": "a method's loop",
    "methods/l2l.py::L2L.train": "a method's loop",
    "methods/pipeline/pipeline.py::Varuna.__init__": "as the original Varuna's users call it",
    "methods/pipeline/schedule.py::_units_by_rules": "the rules of a slot, for all stages at once",
    "papers/report/page.py::template_values": "the values of one template",
    "cases/_morphs.py::run_morphing_job": "one schedule of machines that come and go, in the order of time",
}
WIDER = {
    "harness/base/console.py::print_table": "a title and three ways to print, each with a default",
    "harness/jobs/size_search.py::search": "settings of the search, which property tests vary one by one",
    "harness/jobs/sweep.py::Sweep.__init__": "a sweep's settings, each with a default",
    "harness/models/gpt.py::HeadLoss.forward": "the signature of torch's autograd function",
    "harness/run/launch.py::launch": "a run's settings, each the caller's choice",
    "methods/engines/deepspeed.py::superoffload_worker": "the signature of DeepSpeed's worker, and the release",
    "methods/offload/adamw.py::update": "two states, and when the update may be left",
    "methods/offload/adamw_cuda.py::update_on_gpu": "the schema of the torch op",
    "methods/offload/adamw_kernel.py::update_on_host": "the schema of the torch op",
    "methods/offload/transfer.py::queue": "work on a track: what waits for what; a tuple would cost at each copy",
    "methods/offload/transfer.py::copy": "work on a track: what waits for what; a tuple would cost at each copy",
    "methods/pipeline/config/auto_config.py::AutoConfig.__init__": "as users call it",
    "methods/pipeline/config/simulate.py::simulate_step": "a step's settings, five of them with defaults",
    "methods/pipeline/launch/run.py::launch": "the options of a command line",
    "methods/pipeline/pipeline.py::Varuna.__init__": "as users call it",
    "methods/sharding/orchestrator.py::ModelOrchestrator.__init__": "as users call it",
    "methods/shared/roundings.py::plain_norm": "the signature of torch's layer_norm",
    "methods/streaming/layer_kinds.py::new_layers": "the placement and its memories, before STRONGHOLD's loop",
    "methods/streaming/users/trainers.py::L2LTrainer.__init__": "as users call it",
    "methods/streaming/users/trainers.py::StrongholdTrainer.__init__": "as users call it",
    "papers/figures/plot.py::figure": "a figure's rows and its look, as cases give them",
}
FILES = [path for house in HOUSES for path in sorted((ROOT / house).rglob("*.py"))]


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function with its name, FILE::CLASS.FUNCTION."""

    def inside(node: ast.AST, above: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{above}{child.name}", child
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from inside(child, f"{above}{child.name}.")
            else:
                yield from inside(child, above)

    for path in FILES:
        yield from inside(ast.parse(path.read_text()), f"{path.relative_to(ROOT)}::")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_name_says_what_it_holds(path: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    empty = {token.start[0]: token.string for token in tokens if token.string in EMPTY_NAMES}
    assert not empty, f"{path}: names that say nothing, by line: {empty}"


def test_a_function_fits_on_a_screen() -> None:
    lines = {name: function.end_lineno - function.lineno + 1 for name, function in functions()}  # type: ignore[operator]
    assert {name for name, count in lines.items() if count > MOST_LINES} == set(LONGER)


def test_a_function_takes_few_parameters() -> None:
    counts = {}
    for name, function in functions():
        arguments = function.args
        names = [
            argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ]
        counts[name] = len([argument for argument in names if argument not in ("self", "cls")])
    assert {name for name, count in counts.items() if count > MOST_PARAMETERS} == set(WIDER)
