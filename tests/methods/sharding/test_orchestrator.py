"""Models of one's own, trained together by Hydra: each as if it had been alone, to the last bit."""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.base.checkout import ROOT
from harness.core.job import GIB
from harness.devices import cuda_budget
from methods.hydra import ModelOrchestrator, ModelTask
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_gpu import FakeGpu

NUM_BATCHES = 3
LOSSES = r"(\w+): loss ([\d.]+) at first, ([\d.]+) after"
ADAMW = functools.partial(torch.optim.AdamW, weight_decay=0.1)


class Tied(nn.Module):
    """Tokens to tokens: the last layer's weight is the first's."""

    def __init__(self) -> None:
        super().__init__()
        embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        head.weight = embedding.weight
        self.layers = nn.ModuleList([embedding, nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.2), head])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def perceptron() -> nn.Module:
    layers = [
        nn.Linear(6, 16),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.Dropout(0.1),
        nn.Linear(16, 3),
    ]
    return nn.Sequential(*layers)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16, 3))


def single() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)))


def deep() -> nn.Module:
    inner = [module for _ in range(3) for module in (nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(6, 24), *inner, nn.Linear(24, 3))


def failing_loss(output: Tensor, targets: Tensor) -> Tensor:
    raise RuntimeError("this criterion fails by design")


def killing_loss(output: Tensor, targets: Tensor) -> Tensor:
    os._exit(9)


def tokens_loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def data(
    seed: int, shape: tuple[int, ...], classes: int, targets: tuple[int, ...]
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(NUM_BATCHES):
        inputs = torch.randn(shape, generator=generator)
        found.append((inputs, torch.randint(classes, targets, generator=generator)))
    return found


def tokens(seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(11, (2, 6), generator=generator) for _ in range(NUM_BATCHES)]
    return [(each[:, :-1], each[:, 1:]) for each in drawn]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Any, dict[str, Any]]] = {
    "perceptron": (
        perceptron,
        nn.functional.cross_entropy,
        data(1, (4, 6), 3, (4,)),
        {"epochs": 2, "max_norm": 0.5},
    ),
    "convolution": (convolution, nn.functional.cross_entropy, data(2, (4, 1, 6), 3, (4,)), {"epochs": 1}),
    "single": (single, nn.functional.cross_entropy, data(3, (4, 6), 3, (4,)), {"epochs": 2}),
    "tied": (Tied, tokens_loss, tokens(4), {"epochs": 2, "max_norm": 0.1}),
    "deep": (deep, nn.functional.cross_entropy, data(5, (4, 6), 3, (4,)), {"epochs": 1, "max_norm": 0.5}),
}
FOUR = ("perceptron", "convolution", "single", "tied")


def made(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name][0]()


def tasks(names: Sequence[str] = FOUR, **changes: Any) -> list[ModelTask]:
    found = []
    for seed, name in enumerate(names):
        _, criterion, batches, words = MODELS[name]
        words = {**words, **changes}
        found.append(
            ModelTask(name, made(name), criterion, batches, 0.05, optimizer=ADAMW, seed=seed, **words)
        )
    return found


def alone(name: str, seed: int) -> tuple[list[float], dict[str, Tensor]]:
    """Plain training: the losses, and the final weights."""
    _, criterion, batches, words = MODELS[name]
    model = made(name)
    optimizer = ADAMW(model.parameters(), lr=0.05)
    torch.manual_seed(seed)
    losses = []
    for _ in range(words["epochs"]):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            if "max_norm" in words:
                nn.utils.clip_grad_norm_(model.parameters(), words["max_norm"])
            optimizer.step()
            losses.append(loss.item())
    return losses, dict(model.named_parameters())


def difference(task: ModelTask, seed: int) -> str:
    """Where a task's training parts from plain training; empty where it does not."""
    losses, weights = alone(task.name, seed)
    if task.failure:
        return task.failure
    if task.losses != losses:
        return f"{task.name}: losses {task.losses} instead of {losses}"
    differ = [
        name for name, weight in task.model.named_parameters() if not torch.equal(weight, weights[name])
    ]
    return f"{task.name}: weights of {differ}" if differ else ""


@pytest.mark.parametrize("intermediates", ["checkpointed", "saved"])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_four_models_train_as_if_each_were_alone(num_devices: int, intermediates: str) -> None:
    together = tasks()
    orchestrator = ModelOrchestrator(together, ["cpu"] * num_devices, intermediates=intermediates)
    orchestrator.generate()
    orchestrator.train_models()
    assert [difference(task, seed) for seed, task in enumerate(together)] == [""] * len(together)


@pytest.mark.parametrize("shards", [[1, 2, 3], [6], [5, 1]], ids=str)
def test_presharded_models_train_as_if_alone(shards: list[int]) -> None:
    (task,) = [task for task in tasks() if task.name == "perceptron"]
    task.shards = shards
    orchestrator = ModelOrchestrator([task], double_buffer=shards != [5, 1])
    assert orchestrator.generate()[0]["shards"] == shards
    orchestrator.train_models()
    assert difference(task, 0) == ""


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.AdamW, amsgrad=True),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.NAdam,
    ],
    ids=["sgd", "amsgrad", "adagrad", "rmsprop", "rprop", "nadam"],
)
def test_any_optimizers_states_travel(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    criterion, batches = MODELS["perceptron"][1:3]
    model, plain = made("perceptron"), made("perceptron")
    task = ModelTask("perceptron", model, criterion, batches, 0.05, 2, optimizer, shards=[3, 3])
    ModelOrchestrator([task]).train_models()
    stepped = optimizer(plain.parameters(), lr=0.05)
    torch.manual_seed(0)
    for inputs, targets in batches * 2:
        stepped.zero_grad()
        criterion(plain(inputs), targets).backward()
        stepped.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_an_optimizer_that_keeps_no_tensors_is_named() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["count"] = 1

    criterion, batches = MODELS["perceptron"][1:3]
    task = ModelTask("perceptron", made("perceptron"), criterion, batches, 0.05, optimizer=Counting)
    with pytest.raises(ValueError, match="Counting: expected only tensors as state, got count"):
        ModelOrchestrator([task]).generate()


def test_clipping_by_the_shard_is_that_of_each_shards_own_norm() -> None:
    criterion, batches = MODELS["perceptron"][1:3]
    model, plain = made("perceptron"), made("perceptron")
    words: dict[str, Any] = {"max_norm": 0.05, "clipping": "shard", "shards": [3, 3]}
    ModelOrchestrator([ModelTask("perceptron", model, criterion, batches, 0.05, **words)]).train_models()
    torch.manual_seed(0)
    stepped = torch.optim.SGD(plain.parameters(), lr=0.05)
    for inputs, targets in batches:
        stepped.zero_grad()
        criterion(plain(inputs), targets).backward()
        for half in (plain[:3], plain[3:]):  # type: ignore[index]
            nn.utils.clip_grad_norm_(half.parameters(), 0.05)
        stepped.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_frozen_layers_stay_as_they_are() -> None:
    (task,) = [task for task in tasks() if task.name == "perceptron"]
    first = task.layers[0]
    first.requires_grad_(False)
    before = [parameter.clone() for parameter in first.parameters()]
    ModelOrchestrator([task]).train_models()
    assert all(map(torch.equal, first.parameters(), before))
    assert not torch.equal(task.layers[3].weight, made("perceptron")[3].weight)  # type: ignore[index, arg-type]


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]], ids=len)
def test_a_model_that_fails_ends_alone(devices: list[str]) -> None:
    together = tasks()
    together[2].criterion = failing_loss
    report = ModelOrchestrator(together, devices).train_models()
    assert list(report.failures) == ["single"] and "fails by design" in together[2].failure
    assert [difference(together[seed], seed) for seed in (0, 1, 3)] == ["", "", ""]


def test_a_device_that_dies_takes_one_model_with_it() -> None:
    together = tasks()
    together[2].criterion = killing_loss
    report = ModelOrchestrator(together, ["cpu", "cpu"]).train_models()
    assert "process of its device ended with code 9" in report.failures["single"]
    assert [difference(together[seed], seed) for seed in (0, 1, 3)] == ["", "", ""]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": Scalar()}, "Scalar has no ordered layers"),
        ({"model": nn.Sequential(nn.BatchNorm1d(6))}, r"layer 0 \(BatchNorm1d\) keeps running statistics"),
        ({"epochs": 0}, "epochs: expected at least 1"),
        ({"clipping": "none"}, "clipping: expected global or shard"),
        ({"dataloader": iter(())}, "expected a dataloader with a length"),
        ({"shards": [3, 4]}, r"expected shards that sum to 6 layers, got \[3, 4\]"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused_in_one_line(change: dict[str, Any], text: str) -> None:
    words: dict[str, Any] = {"model": made("perceptron"), "dataloader": MODELS["perceptron"][2]}
    with pytest.raises(ValueError, match=text):
        ModelTask("one", criterion=nn.functional.cross_entropy, lr=0.1, **{**words, **change})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"policy": "longest"}, "policy: expected one of lrtf"),
        ({"devices": []}, "no devices"),
        ({"devices": ["cpu", "cuda:99"]}, "GPUs that torch sees, got cuda:99; try cpu"),
        ({"intermediates": "kept"}, "checkpointed or saved"),
        (
            {"device_memory": 2000},
            r"layer \d needs .* by itself in each of 2 slots: .* smallest feasible device_memory is \d+ bytes",
        ),
    ],
)
def test_an_orchestrator_that_makes_no_sense_is_refused_in_one_line(words: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ModelOrchestrator(tasks(), **words).generate()


def test_no_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        ModelOrchestrator([])


def example(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["two_models.py", *arguments])
    runpy.run_path(str(ROOT / "examples" / "two_models.py"), run_name="__main__")


@pytest.mark.heavy
def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example(monkeypatch)
    losses = {
        name: (float(first), float(last)) for name, first, last in re.findall(LOSSES, capsys.readouterr().out)
    }
    assert set(losses) == {"writer", "reader"}
    assert all(last < 0.8 * first for first, last in losses.values())


def test_the_example_refuses_what_is_no_number_of_devices_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        example(monkeypatch, "foo")
    told = "error: expected one positive integer, the number of devices, got 'foo'\n"
    assert (end.value.code, capsys.readouterr().err) == (2, told)


DOCUMENTED = """
model_hydra_0 = Model(model_0)
dataloader_0 = get_data_loader_train(32)

model_hydra_0 = Model(model_1)
dataloader_1 = get_data_loader_train(32)

task_0 = ModelTask(model_0, loss_fn, dataloader_0, lr_0, epochs_0)
task_1 = ModelTask(model_1, loss_fn, dataloader_1, lr_1, epochs_1)

orchestra = ModelOrchestrator([task_0, task_1])
orchestra.verbose = 1
orchestra.buffer = None

orchestra.generate()
orchestra.train_models()
"""  # the calls of the original's README, as they stand there


@pytest.mark.parametrize("name", ["", "'a name', "])
def test_the_documented_calls_run_unchanged(name: str, capfd) -> None:
    """Without a name as in the original's README, and with one as its code wants it."""
    from methods.hydra import Model

    batches = MODELS["perceptron"][2]
    given: dict[str, Any] = {
        "model_0": made("perceptron"),
        "model_1": made("perceptron"),
        "loss_fn": nn.functional.cross_entropy,
        "get_data_loader_train": lambda batch_size: batches,
        "lr_0": 0.1,
        "lr_1": 0.2,
        "epochs_0": 1,
        "epochs_1": 2,
        "Model": Model,
        "ModelTask": ModelTask,
        "ModelOrchestrator": ModelOrchestrator,
    }
    exec(DOCUMENTED.replace("ModelTask(", f"ModelTask({name}"), given)
    assert [len(given[f"task_{n}"].losses) for n in (0, 1)] == [NUM_BATCHES, 2 * NUM_BATCHES]
    assert f"{3 * NUM_BATCHES} of {3 * NUM_BATCHES} steps of 2 models; " in capfd.readouterr().err
    given["orchestra"].buffer = 10000
    assert "buffer=10000 is not used: " in capfd.readouterr().err
    given["orchestra"].CACHE_SYSTEM = False
    assert "double_buffer=False) replaces it" in capfd.readouterr().err and given["orchestra"].num_slots == 2


def test_a_module_list_is_a_model_and_so_is_what_holds_one() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(made("perceptron"))

    words = MODELS["perceptron"][1], MODELS["perceptron"][2], 0.05, 2, ADAMW
    for model in (nn.ModuleList(made("perceptron")), Holder()):
        task = ModelTask("perceptron", model, *words, max_norm=0.5)
        ModelOrchestrator([task]).train_models()
        assert task.losses == alone("perceptron", 0)[0]


@pytest.mark.parametrize("optimizer, size", [(torch.optim.SGD, 8), (torch.optim.AdamW, 16)])
def test_home_takes_the_bytes_by_which_the_claim_of_110_billion_is_judged(optimizer: Any, size: int) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    task = ModelTask(
        "one", model, nn.functional.mse_loss, [(torch.zeros(2, 256),) * 2], 0.1, optimizer=optimizer
    )
    (row,) = ModelOrchestrator([task]).generate()
    assert row["host_bytes"] / sum(map(torch.numel, model.parameters())) == pytest.approx(size, rel=0.001)


@pytest.mark.parametrize("kind", ["lm", "vit"])
def test_the_originals_workloads_are_twelve_models_that_train(kind: str) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import hydra_workloads

    together = hydra_workloads.tasks(kind, 1, 8, 2)
    assert len({(task.lr, len(task.dataloader[0][0])) for task in together}) == 12
    ModelOrchestrator(together).train_models()
    assert all(len(task.losses) == 2 and not task.failure for task in together)


class _Seeded(torch.autograd.Function):
    """Saves a tensor of another device than its input's, as attention on a GPU saves its seeds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, torch.empty(2, device="meta"))
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        _, seeds = ctx.saved_tensors
        assert seeds.device.type == "meta"
        return dy * 2


class Seeded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Seeded.apply(x)


def test_a_saved_tensor_of_another_device_stays_there() -> None:
    criterion, batches = MODELS["perceptron"][1:3]
    model = nn.Sequential(*made("perceptron").children(), Seeded())
    task = ModelTask("seeded", model, criterion, batches, 0.05, 1)
    ModelOrchestrator([task], intermediates="saved").train_models()
    assert task.failure == ""


def test_a_gpus_random_state_is_made_without_a_context() -> None:
    """As CUDA's generator tells it: the seed and an offset of 0, 8 bytes each."""
    orchestrator = ModelOrchestrator(tasks(["convolution"]), ["cuda:0", "cuda:1"])
    on_cpu, on_gpu = orchestrator._random(258)
    assert torch.equal(on_cpu, torch.Generator().manual_seed(258).get_state())
    assert bytes(on_gpu.tolist()) == bytes([2, 1, *[0] * 14])


def test_a_criterion_with_a_buffer_keeps_its_values() -> None:
    weight = torch.tensor([0.2, 0.3, 0.5])
    criterion = nn.CrossEntropyLoss(weight=weight.clone())
    task = ModelTask("perceptron", made("perceptron"), criterion, MODELS["perceptron"][2], 0.05)
    report = ModelOrchestrator([task], device_memory=2**20).train_models()
    assert report.failures == {} and len(task.losses) == NUM_BATCHES
    assert torch.equal(criterion.weight, weight)  # type: ignore[arg-type]


def test_the_homes_of_one_gpu_s_models_are_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, locked = FakeCuda(1).install(monkeypatch), list[int]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    orchestrator = ModelOrchestrator(tasks(["single"]), ["cuda:0"])
    with cuda.running():
        register = cuda.register
        cuda.register = lambda *given: locked.append(given[1]) or register(*given)  # type: ignore[method-assign]
        cuda.install(monkeypatch)
        orchestrator.train_models()
    homes = {
        slab.untyped_storage().data_ptr(): slab.untyped_storage().nbytes()
        for shards in orchestrator.models
        for shard in shards
        for slab in shard.slabs.values()
    }
    assert sorted(locked) == sorted(homes.values())


def test_models_of_one_gpu_take_the_memory_that_is_allowed_while_they_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, gpu = FakeCuda(1).install(monkeypatch), FakeGpu(8 * GIB, 0, 0)
    gpu.install_nvml(monkeypatch)
    gpu.install_functions(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    caps = list[float]()
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: caps.append(share)
    )
    with cuda.running():
        ModelOrchestrator(tasks(["single"]), ["cuda:0"], device_memory=2 * GIB).train_models()
    assert caps == [pytest.approx((2 * GIB - cuda_budget.CONTEXT_BYTES) / (8 * GIB)), 1.0]


def test_the_memory_of_a_gpu_that_a_refusal_names_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it covers the context and the reserve, too."""
    FakeGpu(8 * GIB, 0, 0).install_nvml(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def cut(device_memory: int) -> None:
        ModelOrchestrator(tasks(["single"]), ["cuda:0"], device_memory=device_memory).generate()

    with pytest.raises(ValueError, match="smallest feasible device_memory") as refused:
        cut(2000)
    least = int(re.findall(r"device_memory is (\d+) bytes", str(refused.value))[0])
    assert least > cuda_budget.CONTEXT_BYTES + cuda_budget.RESERVE_BYTES
    cut(least)
    with pytest.raises(ValueError, match="smallest feasible device_memory"):
        cut(least - 2)


FORETELLS = """
import sys
import torch
from methods.hydra import ModelOrchestrator
from tests.methods.sharding.test_orchestrator import tasks

if __name__ == "__main__":
    torch.cuda.device_count = lambda: 1
    on_gpu, on_cpu = (ModelOrchestrator(tasks(["single"]), [name], device_memory=2**30) for name in ("cuda:0", "cpu"))
    lengths = [[1] * len(on_gpu.tasks[0].layers)]
    found = on_gpu._foretold_bytes(lengths)
    print(torch._C._get_privateuse1_backend_name(), found == on_cpu._foretold_bytes(lengths) > 0)
"""


def test_foretelling_leaves_the_process_able_to_use_its_gpu(tmp_path: Path) -> None:
    """A process that has named a device sim makes no backward pass on a GPU: torch then asks sim for its streams."""
    (script := tmp_path / "script.py").write_text(FORETELLS)
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, env=path)
    assert done.stdout.split() == ["privateuseone", "True"], done.stderr


def test_a_model_whose_class_no_other_process_finds_has_no_foretold_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(nn.Linear):
        pass

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model, data = nn.Sequential(Own(4, 4), Own(4, 4)), [(torch.ones(2, 4), torch.ones(2, 4))]
    task = ModelTask("own", model, nn.MSELoss(), data, 0.05)
    orchestrator = ModelOrchestrator([task], ["cuda:0"], device_memory=2 * GIB)
    assert orchestrator._foretold_bytes([[1, 1]]) is None
    assert orchestrator.generate()[0]["shards"] == [2]
