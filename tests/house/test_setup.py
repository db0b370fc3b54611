"""What `make setup` asks before it installs anything."""

from __future__ import annotations

import pytest

from tools.installed import installed


@pytest.mark.parametrize(("least", "fine"), [("0.1", True), ("8.0", True), ("999.0", False)])
def test_installed(least: str, fine: bool) -> None:
    assert installed("pytest", least) is fine
    assert not installed("no-such-package", least)
