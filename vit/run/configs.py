"""Packaged configurations by their bare names."""

import difflib
from pathlib import Path


def config_folder() -> Path:
    """Where the packaged configurations lie: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """Names that `--config` takes, such as quickstart."""
    folder = config_folder()
    return sorted(str(p.relative_to(folder).with_suffix("").as_posix()) for p in folder.rglob("*.yaml"))


def find_config(name: str) -> Path:
    """A file of that path, or the packaged configuration of that name.

    Raises:
        ValueError: neither exists.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    packaged = config_folder() / path.with_suffix(".yaml")
    if name and not path.is_absolute() and packaged.is_file():
        return packaged
    names = config_names()
    near = difflib.get_close_matches(path.stem, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"expected a configuration: the path of a YAML file, or one of {', '.join(names)}; but got {name!r}.{hint}"
    )
