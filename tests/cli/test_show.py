"""How things are shown."""

from __future__ import annotations

from ridgeline.cli.show import stages_text


def test_only_stages_that_can_be_seen_are_named() -> None:
    assert stages_text({"imports": 2.04, "device": 0.01, "weights": 0.06}) == "imports 2.0 s, weights 0.1 s"
    assert stages_text({}) == ""
