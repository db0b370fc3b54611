"""Rewrites `oneOf` as an equivalent `anyOf` for tagged unions, as pydantic and OpenAPI write them.

The grammar library can only prove that the branches of a `oneOf` exclude each other if they are inline; it refuses branches
behind a `$ref`. If a property has different constants in every branch, no value matches two branches, and `anyOf` allows the
same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.text.schema import map_subschemas

_MAX_PARTS = 64
"""Maximum parts of a reference; deeper schemas are refused."""
_MAX_TAGS = 8
"""Maximum properties tried as a tag if there is no discriminator."""
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Tag:
    """values: constants of the property in a branch. required: the property is required."""

    values: frozenset[Any]
    required: bool


def rewrite_unions(schema: Any) -> Any:
    """The schema with `anyOf` for every `oneOf` whose branches a tag distinguishes. Nothing else changes.

    A tag that `discriminator` names becomes required, as OpenAPI demands (pydantic does not list tags with a default as required,
    but rejects values without one). Recursive: check the schema's depth first.
    """
    return _UnionRewriter(schema).rewrite(schema)


class _UnionRewriter:
    """Rewrites the unions of one schema. Tags are cached by node, so that no chain of references is followed twice."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._tags: dict[tuple[int, str], _Tag | None] = {}
        self._visited: list[Any] = []

    def rewrite(self, node: Any) -> Any:
        if not isinstance(node, dict) or ("$id" in node and node is not self._root):  # its references have another base
            return node
        fresh = map_subschemas(node, self.rewrite)
        branches = fresh.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in fresh and (tag := self._find_tag(fresh, branches)):
            del fresh["oneOf"]
            has_discriminator = "discriminator" in fresh
            fresh["anyOf"] = [self._require(tag, branch) for branch in branches] if has_discriminator else branches
        return fresh

    def _find_tag(self, union: Mapping[str, Any], branches: list[Any]) -> str | None:
        """The property that distinguishes the branches."""
        discriminator = union.get("discriminator")
        if isinstance(discriminator, Mapping):
            name = discriminator.get("propertyName")
            return name if isinstance(name, str) and self._is_tag(name, branches, made_required=True) else None
        properties = self._resolved(branches[0]).get("properties") if branches else None
        names = [name for name in properties or () if self._tag(branches[0], name)][:_MAX_TAGS]
        return next((name for name in names if self._is_tag(name, branches, made_required=False)), None)

    def _is_tag(self, name: str, branches: list[Any], *, made_required: bool) -> bool:
        tags = [self._tag(branch, name) for branch in branches]
        known = [tag for tag in tags if tag is not None]
        values = frozenset[Any]().union(*(tag.values for tag in known))
        optional = 0 if made_required else sum(not tag.required for tag in known)
        return len(known) == len(tags) and optional <= 1 and len(values) == sum(len(tag.values) for tag in known)

    def _require(self, name: str, branch: Any) -> Any:
        tag = self._tag(branch, name)
        required = branch.get("required", [])
        if tag is None or tag.required or not isinstance(required, list):
            return branch
        return {**branch, "required": [*required, name]}

    def _tag(self, node: Any, name: str) -> _Tag | None:
        """The property as a tag of one branch; None if it is not one, or if the branch may be no object."""
        key = (id(node), name)
        if key not in self._tags:
            self._visited.append(node)  # keeps the node alive, so that its id stays unique
            self._tags[key] = None  # the answer within a recursive union
            self._tags[key] = self._read_tag(node, name)
        return self._tags[key]

    def _read_tag(self, node: Any, name: str) -> _Tag | None:
        target = self._resolved(node)
        required = any(name in _strings(part.get("required")) for part in (node, target) if isinstance(part, Mapping))
        inner = target.get("anyOf", target.get("oneOf"))
        if isinstance(inner, list) and inner:
            tags = [self._tag(branch, name) for branch in inner]
            known = [tag for tag in tags if tag is not None]
            if len(known) < len(tags):
                return None
            values = frozenset[Any]().union(*(tag.values for tag in known))
            return _Tag(values, required or all(tag.required for tag in known))
        properties = target.get("properties")
        property_schema = self._resolved(properties.get(name)) if isinstance(properties, Mapping) else {}
        constants: Any = [property_schema["const"]] if "const" in property_schema else property_schema.get("enum")
        if target.get("type") != "object" or not isinstance(constants, list) or not constants:
            return None
        return _Tag(frozenset(constants), required) if all(isinstance(value, _SCALARS) for value in constants) else None

    def _resolved(self, node: Any) -> Mapping[str, Any]:
        """The schema that a reference stands for; an empty schema if it cannot be resolved."""
        for _ in range(_MAX_TAGS):
            if not isinstance(node, Mapping):
                break
            if "$ref" not in node:
                return node
            node = self._dereference(node["$ref"])
        return {}

    def _dereference(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        node = self._root
        for part in reference[2:].split("/", _MAX_PARTS):
            if node is None:
                break
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
            if isinstance(node, Mapping) and "$id" in node:
                return None
        return node


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
