"""What differs between releases of megatron-core, each with its reason. Needs only the standard library."""

from __future__ import annotations

OLDEST = (0, 12)  # the oldest release that trains
