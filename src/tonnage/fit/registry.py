"""All techniques by name, imported on demand."""

from importlib import import_module
from typing import Any

from tonnage.errors import RequestError
from tonnage.fit.technique import Technique
from tonnage.techniques import techniques

_CLASSES: dict[str, str] = {name: row["class"] for name, row in techniques().items() if "class" in row}
NAMES = tuple(_CLASSES)  # without sharding, which comes with a mesh
# Used only if a plan names them, never chosen for a budget.
BY_PLAN = frozenset(name for name, row in techniques().items() if row.get("by_plan"))


def technique_class(name: str) -> type[Technique]:
    if name == "shard":
        from tonnage.fit.sharding.shard import Shard

        return Shard
    if name not in _CLASSES:
        raise RequestError(f"There is no technique {name!r}.", hint=f"Known are {', '.join(NAMES)}.")
    module = import_module(f"tonnage.fit.techniques.{name.replace('-', '_')}")
    found: type[Technique] = getattr(module, _CLASSES[name])
    return found


def make(name: str, settings: dict[str, Any]) -> Technique:
    """Build a technique from its JSON settings."""
    technique = technique_class(name)
    unknown = sorted(set(settings) - set(technique.__dataclass_fields__))
    if unknown:
        raise RequestError(
            f"{name} has no setting {unknown[0]!r}.", hint="The plan may be of another version of Tonnage."
        )
    return technique(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})


def find_conflict(chosen: list[Technique]) -> str | None:
    """Return why these techniques cannot be combined, or None."""
    for one in chosen:
        for other in chosen:
            if other.name in one.conflicts and other is not one:
                return f"{one.title} and {other.title} cannot stand together: {one.conflicts[other.name]}"
    return None
