"""What forks begin with that train or sketch models by their config.json: transformers takes seconds to import."""

import importlib

from harness.models import hub_model

hub_model.library()
# what every family's module imports
for name in ("auto.modeling_auto", "llama.modeling_llama"):
    importlib.import_module(f"transformers.models.{name}")
