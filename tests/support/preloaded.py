"""What forks begin with. The garbage collector does not search it, neither now nor in a fork, which would copy it."""

import gc
import importlib

from harness.base.checked_data import _adapter
from harness.core.record import Record
from harness.run import warm_start

gc.disable()
for name in (*warm_start.PRELOADED, "tests.support.on_sim", "harness.gate.inspect_training", "harness.run.worker"):
    importlib.import_module(name)
_adapter(Record)
gc.freeze()
gc.enable()
