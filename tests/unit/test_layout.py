"""The shape of the repository: who imports whom, what loads without torch, what is generated."""

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.protos import PROTO_ROOT, generate

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "stagespec": {"stagespec"},
    "services": {"stagespec", "services"},
    "orchestrator": {"stagespec", "orchestrator"},
    "deploy": {"stagespec", "services", "orchestrator", "deploy"},
}
FOLDERS = {name: ROOT / name for name in MAY_IMPORT} | {"stagespec": PROTO_ROOT / "stagespec"}
WITHOUT_TORCH = ("stagespec", "orchestrator", "services/ngram")


def modules(package: str) -> list[Path]:
    return sorted(FOLDERS[package].rglob("*.py"))


def module_name(package: str, path: Path) -> str:
    parts = (package, *path.relative_to(FOLDERS[package]).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package):
    assert modules(package)
    for path in modules(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                names = [node.module or ""]
            tops = {name.split(".")[0] for name in names} & MAY_IMPORT.keys()
            assert tops <= MAY_IMPORT[package], f"{path} imports {tops - MAY_IMPORT[package]}"


def test_orchestrator_and_ngram_load_where_there_is_no_torch():
    names = [
        module_name(package.split("/")[0], path)
        for package in WITHOUT_TORCH
        for path in modules(package.split("/")[0])
        if package.split("/")[-1] in path.parts
    ]
    assert len(names) > 20
    program = "import sys, importlib\nsys.modules['torch'] = None\n"
    program += "".join(f"importlib.import_module({name!r})\n" for name in names)
    path = f"{ROOT}:{PROTO_ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_packages_are_the_ones_of_this_repository():
    for package, folder in FOLDERS.items():
        assert Path(importlib.import_module(package).__file__ or "").parent == folder


def test_generated_code_is_fresh(tmp_path):
    fresh = generate(tmp_path)
    committed = sorted((PROTO_ROOT / "stagespec/v1").glob("*_pb2*"))
    assert [path.name for path in fresh] == [path.name for path in committed]
    for new, old in zip(fresh, committed, strict=True):
        assert _without_patch(new) == _without_patch(old), f"{old.name} is stale: run `make protos`"


def _without_patch(path):
    """Generated text is the same for every patch release of the generator, which it names."""
    return re.sub(r"(GRPC_GENERATED_VERSION = '\d+\.\d+)\.\d+'", r"\1'", path.read_text(encoding="utf-8"))


def test_examples_in_docstrings_are_true():
    num_examples = 0
    for package in ("stagespec", "services", "orchestrator"):
        for path in modules(package):
            if ">>>" not in path.read_text(encoding="utf-8"):
                continue
            result = doctest.testmod(importlib.import_module(module_name(package, path)))
            assert result.failed == 0, path
            num_examples += result.attempted
    assert num_examples >= 5
