"""Four folders at top level, one import name: what a wheel holds, and that nobody else's packages are in its way."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("models", "recipes", "launch")  # cpkit/NAME is a link to ../NAME
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "cpkit", *MAPPED)
KERNELS = ("flash_attn", "flash_attn_interface", "deep_gemm")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
FACTS = """
import json, runpy, sys
import transformers.modeling_utils
sys.modules.pop("flash_attn", None)  # transformers tries it
import cpkit, cpkit.launch, cpkit.models, cpkit.recipes
import torch.distributed as dist
files = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in ("cpkit", "models", "recipes", "launch")}
print(json.dumps({"files": files, "modules": list(sys.modules), "distributed": dist.is_initialized()}))
sys.argv[1:] = ["--help"]
runpy.run_module("cpkit.launch", run_name="__main__", alter_sys=True)  # python -m cpkit.launch --help
"""


def copy_tree(target: Path, links: bool = True) -> Path:
    """What a build needs of the checkout; without ``links``, as git writes it where links are not to be had."""
    target.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, target)
        else:
            ignore = shutil.ignore_patterns("__pycache__", *(MAPPED if name == "cpkit" else ()))
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in MAPPED:
        link = target / "cpkit" / name
        link.symlink_to(f"../{name}") if links else link.write_text(f"../{name}")
    return target


def on_disk() -> set[str]:
    """Every file of the package by its path in a wheel."""
    files = set()
    for top, prefix in (("cpkit", ""), *((name, "cpkit/") for name in MAPPED)):
        for folder, subfolders, names in os.walk(ROOT / top):  # does not follow the links
            subfolders[:] = [s for s in subfolders if s != "__pycache__"]
            files |= {prefix + (Path(folder) / n).relative_to(ROOT).as_posix() for n in names}
    return files - {f"cpkit/{name}" for name in MAPPED}


def python(*args: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True)


def facts(cwd: Path, path: Path | None = None) -> dict:
    """What a process that starts in ``cwd`` imports as cpkit, and the help that it prints."""
    done = python("-c", FACTS, cwd=cwd, path=path)
    assert done.returncode == 0, done.stderr
    first, help_text = done.stdout.split("\n", 1)
    return json.loads(first) | {"help": help_text}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Wheels from a checkout, from its sdist and from a checkout without links; the first also unpacked."""
    folder = tmp_path_factory.mktemp("wheels")

    def build(kind: str, tree: Path) -> Path:
        out = folder / f"{tree.name}-{kind}"
        out.mkdir()
        done = python("-c", BUILD, f"build_{kind}", str(out), cwd=tree)
        assert done.returncode == 0, done.stderr
        return next(out.iterdir())

    checkout = copy_tree(folder / "checkout")
    shutil.unpack_archive(build("sdist", checkout), folder / "unpacked", filter="data")
    from_sdist = next((folder / "unpacked").iterdir())
    wheels = {
        "checkout": build("wheel", checkout),
        "sdist": build("wheel", from_sdist),
        "no links": build("wheel", copy_tree(folder / "no-links", links=False)),
    }
    site = folder / "site"
    zipfile.ZipFile(wheels["checkout"]).extractall(site)
    return SimpleNamespace(wheels=wheels, site=site)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory) -> Path:
    """A working directory with packages of the same names, and empty ones in place of the optional kernels."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in MAPPED:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    for name in KERNELS:
        (folder / f"{name}.py").touch()
    return folder


@pytest.fixture(scope="session")
def imported(built, hostile) -> dict:
    return facts(hostile, built.site)


def test_every_folder_with_python_files_is_a_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {str(Path(name).parent).replace("/", ".") for name in on_disk() if name.endswith(".py")}
    assert set(listed) == folders


@pytest.mark.parametrize("source", ["checkout", "sdist", "no links"])
def test_wheel_holds_every_file_and_adds_one_name(built, source):
    names = {n for n in zipfile.ZipFile(built.wheels[source]).namelist() if not n.endswith("/")}
    inside = {n for n in names if ".dist-info/" not in n}
    assert inside == on_disk()
    assert {n.split("/")[0].split("-")[0] for n in names} == {"cpkit"}


def test_installed_package_ignores_packages_of_the_working_directory(imported, built):
    for name, file in imported["files"].items():
        assert name.split(".")[0] == "cpkit"
        assert Path(file).is_relative_to(built.site), name
    assert "verify" in imported["help"]


def test_import_does_nothing_process_wide(imported):
    assert not set(KERNELS) & set(imported["modules"])
    assert not imported["distributed"]


def test_checkout_imports_its_own_folders():
    found = facts(ROOT)
    for name in MAPPED:
        assert Path(found["files"][f"cpkit.{name}"]).resolve() == ROOT / name / "__init__.py"
        assert name not in found["files"]
    assert "verify" in found["help"]


@pytest.mark.parametrize("name", MAPPED)
def test_top_level_name_is_refused(name):
    done = python("-c", f"import {name}", cwd=ROOT)
    assert done.returncode != 0
    assert f"ImportError: this folder is the package cpkit.{name}" in done.stderr


def lint_imports(tree: Path) -> subprocess.CompletedProcess:
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([command, "--no-cache"], cwd=tree, capture_output=True, text=True)


def test_imports_run_down_only(tmp_path):
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    tree = copy_tree(tmp_path / "upward")
    with open(tree / "models" / "__init__.py", "a") as module:
        module.write("\nimport cpkit.launch\n")
    assert "cpkit.models is not allowed to import cpkit.launch" in lint_imports(tree).stdout
