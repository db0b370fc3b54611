"""Unions told apart by a tag, as pydantic and OpenAPI write them: `oneOf` as the `anyOf` that means the same.

The grammar library proves that branches of a `oneOf` exclude each other only where they stand in place; behind a `$ref` it
refuses them. Where a property holds other constants in every branch, nothing is both, and `anyOf` allows the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.text.schema import mapped

_MOST_PARTS = 64
"""Parts of a reference that are followed; deeper schemas are refused."""
_MOST_TAGS = 8
"""Properties tried as a tag where no discriminator names it."""
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Tag:
    """values: what the property may hold in a branch. required: it has to be there."""

    values: frozenset[Any]
    required: bool


def settle_unions(schema: Any) -> Any:
    """The schema with `anyOf` for every `oneOf` whose branches a tag tells apart; nothing else changes.

    A tag that `discriminator` names is made required, as OpenAPI demands of it (pydantic leaves out tags with a default, and
    then takes no value without one). Recursive: check the schema's depth first.
    """
    return _Settling(schema).settle(schema)


class _Settling:
    """One schema's unions. Tags that were looked for are kept by node, so that no chain of references is walked twice."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[tuple[int, str], _Tag | None] = {}
        self._alive: list[Any] = []

    def settle(self, node: Any) -> Any:
        if not isinstance(node, dict) or ("$id" in node and node is not self._root):  # references in it mean others
            return node
        fresh = mapped(node, self.settle)
        branches = fresh.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in fresh and (tag := self._telling(fresh, branches)):
            del fresh["oneOf"]
            named = "discriminator" in fresh
            fresh["anyOf"] = [self._demand(tag, branch) for branch in branches] if named else branches
        return fresh

    def _telling(self, union: Mapping[str, Any], branches: list[Any]) -> str | None:
        """The property that tells the branches apart."""
        named = union.get("discriminator")
        if isinstance(named, Mapping):
            name = named.get("propertyName")
            return name if isinstance(name, str) and self._apart(name, branches, demanded=True) else None
        properties = self._resolved(branches[0]).get("properties") if branches else None
        names = [name for name in properties or () if self._tag(branches[0], name)][:_MOST_TAGS]
        return next((name for name in names if self._apart(name, branches, demanded=False)), None)

    def _apart(self, name: str, branches: list[Any], *, demanded: bool) -> bool:
        tags = [self._tag(branch, name) for branch in branches]
        known = [tag for tag in tags if tag is not None]
        seen = frozenset[Any]().union(*(tag.values for tag in known))
        optional = 0 if demanded else sum(not tag.required for tag in known)
        return len(known) == len(tags) and optional <= 1 and len(seen) == sum(len(tag.values) for tag in known)

    def _demand(self, name: str, branch: Any) -> Any:
        tag = self._tag(branch, name)
        asked = branch.get("required", [])
        if tag is None or tag.required or not isinstance(asked, list):
            return branch
        return {**branch, "required": [*asked, name]}

    def _tag(self, node: Any, name: str) -> _Tag | None:
        """The property as a tag of one branch; None where it is none, or the branch may be no object."""
        key = (id(node), name)
        if key not in self._found:
            self._alive.append(node)  # or another node could be given its id
            self._found[key] = None  # of a union within itself nothing is said
            self._found[key] = self._look(node, name)
        return self._found[key]

    def _look(self, node: Any, name: str) -> _Tag | None:
        target = self._resolved(node)
        demanded = any(name in _strings(one.get("required")) for one in (node, target) if isinstance(one, Mapping))
        inner = target.get("anyOf", target.get("oneOf"))
        if isinstance(inner, list) and inner:
            tags = [self._tag(branch, name) for branch in inner]
            known = [tag for tag in tags if tag is not None]
            if len(known) < len(tags):
                return None
            values = frozenset[Any]().union(*(tag.values for tag in known))
            return _Tag(values, demanded or all(tag.required for tag in known))
        properties = target.get("properties")
        held = self._resolved(properties.get(name)) if isinstance(properties, Mapping) else {}
        constants: Any = [held["const"]] if "const" in held else held.get("enum")
        if target.get("type") != "object" or not isinstance(constants, list) or not constants:
            return None
        return _Tag(frozenset(constants), demanded) if all(isinstance(one, _PLAIN) for one in constants) else None

    def _resolved(self, node: Any) -> Mapping[str, Any]:
        """What a reference within the schema stands for; an empty schema for what cannot be followed."""
        for _ in range(_MOST_TAGS):
            if not isinstance(node, Mapping):
                break
            if "$ref" not in node:
                return node
            node = self._follow(node["$ref"])
        return {}

    def _follow(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        node = self._root
        for part in reference[2:].split("/", _MOST_PARTS):
            if node is None:
                break
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
            if isinstance(node, Mapping) and "$id" in node:
                return None
        return node


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()
