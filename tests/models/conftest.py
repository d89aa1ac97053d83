"""What the model tests share."""

import jaxtyping
import pytest


@pytest.fixture
def as_users_run(monkeypatch):
    """Without the type checks that tests add, so that the package's own messages answer."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
