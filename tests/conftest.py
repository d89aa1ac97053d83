"""What all tests share: shapes checked at run time, no network, an own cache, the maintainers' data by name."""

import os
from pathlib import Path

import jaxtyping
import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Shapes written in signatures are checked in every test.
install_import_hook("vit", "typechecking.check")

SHARED = Path(__file__).resolve().parents[2] / "shared"
# Debian's package dataset-fashion-mnist; `.ci/run` installs it.
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def pytest_collection_modifyitems(config, items):
    """Deselect what needs data that is absent here; under CI let it fail instead."""
    if os.environ.get("CI") == "true":
        return
    absent = {marker for marker, place in (("shared", SHARED), ("fashion_mnist", FASHION_MNIST)) if not place.is_dir()}
    dropped = [item for item in items if absent & set(item.keywords)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not absent & set(item.keywords)]
        config.stash[DROPPED] = len(dropped)


DROPPED: pytest.StashKey[int] = pytest.StashKey()


def pytest_terminal_summary(terminalreporter, config):
    """Say what was left out."""
    if dropped := config.stash.get(DROPPED, 0):
        terminalreporter.write_line(
            f"{dropped} tests deselected: they need the maintainers' weights and data, which a clone does not have, "
            "or Debian's package dataset-fashion-mnist."
        )


@pytest.fixture(scope="session")
def shared() -> Path:
    """The maintainers' weights and data."""
    assert SHARED.is_dir(), f"the maintainers' weights and data are expected at {SHARED}"
    return SHARED


@pytest.fixture(scope="session")
def fashion_mnist() -> Path:
    """Debian's Fashion-MNIST."""
    assert FASHION_MNIST.is_dir(), f"expected {FASHION_MNIST}: apt-get install dataset-fashion-mnist"
    return FASHION_MNIST


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Path:
    """A cache folder of the test run's own."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["VIT_CACHE"] = str(folder)
    return folder


@pytest.fixture
def as_users_run(monkeypatch):
    """Without the type checks that tests add, so that the package's own messages answer."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
