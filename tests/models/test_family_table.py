"""docs/model-families.md says what the registry says."""

from __future__ import annotations

from pathlib import Path

from ridgeline.models.families import FAMILIES
from ridgeline.models.tensor_names import LAYOUTS

PAGE = Path(__file__).parents[2] / "docs/model-families.md"


def test_the_table_lists_the_registry() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if "| `" in line
    ]
    said = {kind.strip("`"): (label, *rest) for label, kind, _, *rest in rows if kind != "`model_type`"}
    word = {True: "yes", False: "no"}
    expected = {}
    for kind, family in FAMILIES.items():
        layout, traits = LAYOUTS.get(family.architectures[0]), family.traits
        whole = not (traits.get("interleaved") or (layout and (layout.fused or layout.stacked_experts)))
        plain = {"norm", "pre_norms", "gated", "parallel"}.isdisjoint(traits) and not family.numbers.keys() & {
            "logit_scale"
        }
        trainable = layout is None and plain and whole and family.experts is None
        expected[kind] = family.label, word[whole], word[trainable]
    assert said == expected
