"""The rules of the source tree that no other test would notice: who imports whom, names, sizes, shapes.

Each rule is a function from source text to complaints, so that it can be shown a bad source as well: the
last tests plant one per rule.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "qwen35_jax"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE
TESTS = Path(__file__).parent

# Every part of the package, lowest first. A part imports itself and parts on lower lines only.
LAYERS = (
    ("chips", "errors"),
    ("config",),
    ("layer_groups", "logical_axes", "ops", "spec"),
    ("cache",),
    ("nn",),
    ("model",),
    ("checkpoint", "sharding"),
    ("inference", "inspect", "quantization", "verify"),
    (
        "training",
    ),  # reads chats by the template and the tokenizer of inference, and samples answers on the way
    ("planning",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {part: height for height, parts in enumerate(LAYERS) for part in parts}

LINE_LIMIT = 450
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "tools", "stuff"}
OPS_LIBRARIES = {"jax", "jaxlib", "numpy", "einops", "jaxtyping", "chex"}
SHAPED = {"Float", "Int", "Bool", "Num", "Shaped", "Inexact", "Integer", "UInt", "Key"}
BARE_ARRAYS = {"Array", "jax.Array", "jnp.ndarray", "np.ndarray", "ArrayLike", "jax.typing.ArrayLike", "Any"}


def module_name(file: Path) -> str:
    parts = [PACKAGE, *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """`ops` for `qwen35_jax.ops.rope`; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imported_modules(module: str, source: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Every import in a file, wherever it stands, as (line, absolute dotted name).

    `from a import b` counts as `a.b`, since b may be a module; the readers of this list cut it to size.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def layer_faults(module: str, source: str) -> list[str]:
    """Imports of this file that point upwards or sideways."""
    part = part_of(module)
    if module == PACKAGE:
        return []  # the front door may show anything
    if part not in HEIGHT:
        return [f"{module}: {part!r} has no place in LAYERS"]
    faults = []
    for line, imported in imported_modules(module, source):
        if imported.split(".")[0] != PACKAGE:
            continue
        other = part_of(imported)
        if other == part:
            continue
        if other not in HEIGHT:
            faults.append(f"{module}:{line}: imports {imported}, which has no place in LAYERS")
        elif HEIGHT[other] >= HEIGHT[part]:
            faults.append(f"{module}:{line}: imports {imported}, which is not below {part}")
    return faults


def ops_library_faults(module: str, source: str) -> list[str]:
    """Imports of an ops file beyond the array libraries: Flax above all."""
    allowed = OPS_LIBRARIES | sys.stdlib_module_names | {PACKAGE}
    return [
        f"{module}:{line}: ops may not import {imported}"
        for line, imported in imported_modules(module, source)
        if imported.split(".")[0] not in allowed
    ]


def name_faults(file: Path) -> list[str]:
    words = set(file.stem.lower().split("_"))
    return [f"{file.name}: names no subject"] if words & VAGUE_NAMES else []


def size_faults(file: Path, source: str) -> list[str]:
    lines = source.count("\n")
    return [f"{file.name}: {lines} lines, at most {LINE_LIMIT}"] if lines > LINE_LIMIT else []


def annotation_faults(module: str, source: str) -> list[str]:
    """Places of an ops file where an array goes by without its shape.

    Looks at the signatures of public functions, where nothing may be left out, and at the fields of classes.
    """
    faults = []
    for node in ast.parse(source).body:
        named: dict[str, ast.expr | None] = {}
        if isinstance(node, ast.ClassDef):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            named = {ast.unparse(field.target): field.annotation for field in fields}
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            named = {argument.arg: argument.annotation for argument in every}
            named["its result"] = node.returns
        for name, annotation in named.items():
            if annotation is None:
                faults.append(f"{module}:{node.lineno}: {name} has no annotation")
            elif hides_shape(annotation):
                faults.append(f"{module}:{node.lineno}: {name} is an array of no stated shape")
    return faults


def hides_shape(annotation: ast.expr) -> bool:
    """Whether a bare array type stands in an annotation, outside a jaxtyping shape."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).split(".")[-1] in SHAPED:
        return False
    if ast.unparse(annotation) in BARE_ARRAYS:
        return True
    return any(
        hides_shape(child) for child in ast.iter_child_nodes(annotation) if isinstance(child, ast.expr)
    )


def source_files() -> list[Path]:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 20, f"found only {len(files)} files under {SOURCE}"
    return files


def complaints(faults: list[str]) -> str:
    return "\n".join(["", *faults])


def test_imports_point_one_way():
    faults = [fault for file in source_files() for fault in layer_faults(module_name(file), file.read_text())]
    assert not faults, complaints(faults)


def test_no_module_takes_part_in_an_import_cycle():
    modules = {module_name(file): file for file in source_files()}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        package = file.name == "__init__.py"
        targets = set()
        for _, imported in imported_modules(module, file.read_text(), is_package=package):
            # A package's __init__ gathers its own modules; they reach one another by their own names.
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules and target != module:
                targets.add(target)
        graph[module] = targets
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_ops_know_arrays_only():
    files = [file for file in source_files() if part_of(module_name(file)) == "ops"]
    assert files
    faults = [fault for file in files for fault in ops_library_faults(module_name(file), file.read_text())]
    assert not faults, complaints(faults)


def test_public_ops_state_the_shapes_of_their_arrays():
    files = [file for file in source_files() if part_of(module_name(file)) == "ops"]
    faults = [fault for file in files for fault in annotation_faults(module_name(file), file.read_text())]
    assert not faults, complaints(faults)


def test_every_file_is_named_after_its_subject():
    files = [*source_files(), *TESTS.rglob("*.py")]
    faults = [fault for file in files for fault in name_faults(file)]
    assert not faults, complaints(faults)


def test_no_source_file_outgrows_its_subject():
    faults = [fault for file in source_files() for fault in size_faults(file, file.read_text())]
    assert not faults, complaints(faults)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("qwen35_jax.ops.rope", "from qwen35_jax.nn.norm import RMSNorm"),
        ("qwen35_jax.ops.rope", "import qwen35_jax.cli.main"),
        ("qwen35_jax.ops.rope", "from ..nn import norm"),
        ("qwen35_jax.ops.rope", "def late():\n    from qwen35_jax import model"),
        ("qwen35_jax.checkpoint.hf", "from qwen35_jax.sharding import mesh"),
        ("qwen35_jax.checkpoint.hf", "from qwen35_jax import unheard_of"),
        ("qwen35_jax.unheard_of", "import math"),
    ],
)
def test_a_planted_upward_import_is_found(module, line):
    assert layer_faults(module, line)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("qwen35_jax.nn.norm", "from qwen35_jax.ops import norms"),
        ("qwen35_jax.nn.norm", "from . import parameter"),
        ("qwen35_jax.cli.main", "import argparse, qwen35_jax.errors"),
    ],
)
def test_a_downward_import_is_allowed(module, line):
    assert not layer_faults(module, line)


@pytest.mark.parametrize("line", ["from flax import nnx", "import flax.linen as nn", "import optax"])
def test_a_planted_library_in_ops_is_found(line):
    assert ops_library_faults("qwen35_jax.ops.rope", line)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): ...",
        "def f(x: Array) -> Array: ...",
        'def f(x: Float[Array, "time"]): ...',
        'def f(x: Float[Array, "time"], y: Array | None) -> Float[Array, "time"]: ...',
        'def f(x: Float[Array, "time"], *, y: jax.Array) -> tuple[Float[Array, "time"], int]: ...',
        'def f(x: Float[Array, "time"]) -> tuple[Array, Array]: ...',
        "class Terms(NamedTuple):\n    inverse: Array",
    ],
)
def test_a_planted_shapeless_array_is_found(source):
    assert annotation_faults("qwen35_jax.ops.rope", source)


@pytest.mark.parametrize(
    "source",
    [
        'def f(x: Float[Array, "time"], n: int = 1) -> tuple[Float[Array, "time"], Int[Array, ""]]: ...',
        'class Terms(NamedTuple):\n    inverse: jt.Float[jax.Array, "time"]',
        "def _private(x): ...",
    ],
)
def test_a_stated_shape_is_allowed(source):
    assert not annotation_faults("qwen35_jax.ops.rope", source)


def test_a_planted_vague_or_endless_file_is_found():
    assert name_faults(Path("model_utils.py"))
    assert name_faults(Path("misc.py"))
    assert not name_faults(Path("rope.py"))
    assert size_faults(Path("rope.py"), "\n" * (LINE_LIMIT + 1))
    assert not size_faults(Path("rope.py"), "\n" * LINE_LIMIT)
