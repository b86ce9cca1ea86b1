"""The types of values in JSON."""

from typing import Any, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
# A JSON object, such as an entry of run.json. Its reader knows the keys.
JsonObject: TypeAlias = dict[str, Any]
