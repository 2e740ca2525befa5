"""Trains the reference with other roundings. The gate's probe measures how far these runs are from the plain reference;
a method at such a distance may differ by rounding alone.

Only the probe (harness/gate/probe.py) finds this method. The models take turns, step by step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from harness.core.job import Plan, Room, Workload
from harness.core.method import Method, OtherModel, Step, Trained, Training
from methods.shared.memory_needs import resident_plan


@dataclass(frozen=True)
class Rounded(Method):
    names: str  # roundings of methods/shared/roundings.py, separated by commas

    label = "The reference by other roundings"
    scales_loss = True
    accumulates = True
    takes_config = True  # trains models that a config.json describes, too
    takes_lora = True  # trains adapters alone on frozen weights, too

    def plan(self, workload: Workload, room: Room) -> Plan:
        plan, num_models = resident_plan(workload), len(self.names.split(","))
        return dataclasses.replace(
            plan, device={kind: num_models * size for kind, size in plan.device.items()}
        )

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods.resident import ReferenceModel
        from methods.shared.roundings import rounding_of

        models = [ReferenceModel(workload, device, rounding_of(name)) for name in self.names.split(",")]
        steps: list[list[Step]] = [[] for _ in models]
        for number, (inputs, targets) in enumerate(batches, start=1):
            for model_steps, model in zip(steps, models, strict=True):
                model_steps.append(model.step(number, inputs, targets))
            yield steps[0][-1]
        others = [
            OtherModel.of({}, model_steps, model.tensors())
            for model_steps, model in zip(steps[1:], models[1:], strict=True)
        ]
        return Trained(models[0].tensors(), schedule={"num_models": len(models)}, others=others)
