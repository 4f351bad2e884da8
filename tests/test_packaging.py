"""The package as it is installed: folders and import names, lazy public names, and what an import does not drag in."""

import subprocess
import sys
from pathlib import Path

import pytest

import autoshard

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``code``."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout.split())


def test_every_folder_of_code_is_packaged():
    setup = SETTINGS["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for top in ("autoshard", "passes", "solvers") for path in (ROOT / top).rglob("*.py")}
    names = {folder: ".".join(folder.parts) for folder in folders}
    expected = {name if name.startswith("autoshard") else f"autoshard.{name}" for name in names.values()}
    assert set(setup["packages"]) == expected and len(setup["packages"]) == len(expected)
    assert setup["package-dir"] == {"autoshard": "autoshard", "autoshard.passes": "passes", "autoshard.solvers": "solvers"}


def test_passes_and_solvers_have_one_name_each():
    import autoshard.passes
    import autoshard.solvers

    for package, folder in ((autoshard.passes, "passes"), (autoshard.solvers, "solvers")):
        assert Path(package.__file__).parent == ROOT / folder
        assert folder not in sys.modules, f"{folder} was imported beside autoshard.{folder}: there are two copies of its classes"


def test_every_module_has_its_layer():
    layers = next(c["layers"] for c in SETTINGS["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    listed = {name.strip() for layer in layers for name in layer.split("|")}
    modules = {path.stem for path in (ROOT / "autoshard").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert listed == modules - {"__init__"} | {"passes", "solvers"}


@pytest.mark.parametrize("name", autoshard.__all__)
def test_public_names_resolve(name):
    assert callable(getattr(autoshard, name))
    assert not (ROOT / "autoshard" / f"{name}.py").exists(), "importing the module would replace the public name"


def test_an_unknown_public_name():
    with pytest.raises(AttributeError, match="module 'autoshard' has no attribute 'compiled'"):
        autoshard.compiled  # noqa: B018 (it raises)


def test_importing_autoshard_loads_nothing_heavy():
    assert not loaded_after("import autoshard") & {"torch", "ortools", "numpy", "autoshard.compiler"}


def test_the_runtime_loads_no_solver_and_no_planner():
    every_module = """
import importlib, pkgutil, autoshard.runtime
for module in pkgutil.walk_packages(autoshard.runtime.__path__, "autoshard.runtime."):
    importlib.import_module(module.name)
"""
    loaded = loaded_after(every_module)
    ours = {name.split(".")[1] for name in loaded if name.startswith("autoshard.")}
    assert ours <= {"runtime", "errors", "mesh", "placement", "schedule", "signature", "torch_private"} and not loaded & {"ortools", "rich"}
    assert {"torch", "autoshard.runtime.convert"} <= loaded
