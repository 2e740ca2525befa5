"""What forks begin with that train by engines: several ranks import them once, not each of them."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # the tests' engines train there, also beside a GPU

import deepspeed  # noqa: F401

import methods.engines.megatron  # noqa: F401
import tests.support.preloaded_models  # noqa: F401
