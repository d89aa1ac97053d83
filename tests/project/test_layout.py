"""Ratchets: imports go one way, files stay small, public names and options change only on purpose."""

import ast
import re
from pathlib import Path

import pytest
import yaml

import vit
from vit.run.configs import config_folder, config_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vit"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    "vit.run.folder": 0,
    "vit.models": 1,
    "vit.data": 1,
    "vit.explain": 2,
    "vit.evaluate": 3,
    "vit.deploy": 4,
    "vit.tasks": 5,
    "vit.report": 6,
    "vit.run": 7,
    "vit.api": 8,
    "vit.cli": 8,
    "vit": 9,
}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def home(module: str) -> str:
    """The longest entry of the floor table that holds a module."""
    return max((key for key in FLOORS if module == key or module.startswith(key + ".")), key=len)


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            module = node.module or ""
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    modules = {name_of(f) for f in FILES}
    return {name for name in found if name in modules}


def wrong_arrows(graph: dict[str, set[str]]) -> list[str]:
    wrong = []
    for module, used in graph.items():
        for other in used - {"vit"}:
            here, there = home(module), home(other)
            if here != there and FLOORS[here] <= FLOORS[there]:
                wrong.append(f"{module} imports {other}")
    return wrong


GRAPH = {name_of(file): imports(file) for file in FILES}


def test_imports_go_from_higher_floors_to_lower_ones():
    assert wrong_arrows(GRAPH) == []
    assert wrong_arrows({"vit.data.table": {"vit.models.vit"}}), "the test would see a wrong arrow"
    assert wrong_arrows({"vit.models.vit": {"vit.tasks.classify"}})


def test_there_is_no_circle_of_imports():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in GRAPH.get(module, set()) - {module}:
                # A package's own __init__ names its files.
                if not other.startswith(module + ".") and not module.startswith(other + "."):
                    visit(other, (*path, module))
            done.add(module)

    for module in GRAPH:
        visit(module, ())


def test_models_know_no_lightning():
    for file in (PACKAGE / "models").rglob("*.py"):
        assert "lightning" not in file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_files_and_functions_stay_small(file):
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            documented = len((ast.get_docstring(node) or "").splitlines())
            assert lines - documented <= 60, f"{node.name} has {lines} lines"
            arguments = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
            # What a class is made from is its options, one each on the command line.
            limit = 12 if node.name == "__init__" else 8
            assert len(arguments) <= limit, f"{node.name} has {len(arguments)} arguments"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_public_names_are_documented(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{file} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_public_names_change_only_on_purpose():
    assert sorted(vit.__all__) == [
        "Classifier",
        "ImageDataModule",
        "ViTConfig",
        "VisionTransformer",
        "fit",
        "fit_many",
        "load",
        "sweep",
        "test",
        "validate",
        "vit_config",
    ]
    for name in vit.__all__:
        assert getattr(vit, name) is not None


def test_readme_names_only_what_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)h#]+)\)", text):
        assert (ROOT / target).exists(), target
    for name in config_names():
        assert f"`{name}`" in text
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    install = re.search(r'pip install --editable "\.\[dev\]"', text)
    assert install
    assert '--editable ".[dev]"' in makefile


def test_configurations_travel_inside_the_wheel():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"configs" = "vit/configs"' in text
    assert config_folder() == ROOT / "configs"
    for name in config_names():
        assert isinstance(yaml.safe_load((config_folder() / f"{name}.yaml").read_text(encoding="utf-8")), dict)
