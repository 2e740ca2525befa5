"""The type of a JSON object, such as a record's evidence or the content of a file."""

from typing import Any

JsonObject = dict[str, Any]
