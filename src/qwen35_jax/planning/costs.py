"""What one execution of a compiled program costs a device: products, traffic with its main memory, collectives.

Counted from the program's text, with every computation taken as often as it runs. XLA's own cost analysis takes the
body of a loop once, and counts what stays on the chip as traffic.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from qwen35_jax.planning.hlo import Computation, Instruction, Module, Shape
from qwen35_jax.planning.loops import Runs

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)

_MOVES_NOTHING = frozenset(
    """parameter constant get-tuple-element tuple bitcast while conditional call after-all partition-id replica-id
    optimization-barrier iota domain add-dependency async-start async-update async-done""".split()
)
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_ASYNC_START, _ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_PASSES = {"highest": 6, "high": 3}
"""How often the matrix unit, which multiplies bfloat16, goes over a product of float32 operands asked for so exactly.
By default once."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind, over devices in groups of one size.

    Attributes:
        kind: as HLO spells it.
        group: devices that take part together.
        count: how many are executed.
        nbytes: that a device sends for all of them, by the algorithm that sends least.
    """

    kind: str
    group: int
    count: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of one execution, on one device.

    Attributes:
        flops: of sums of products, as matrix products are, two for each; custom calls as they declare.
        matrix_flops: the same, with a product of float32 counted as often as the matrix unit goes over it.
        hbm_bytes: read from and written to the device's main memory.
        collectives: by kind and group.
        unknown_loops: loops whose trips depend on data.
    """

    flops: int
    matrix_flops: int
    hbm_bytes: int
    collectives: tuple[Collective, ...]
    unknown_loops: int

    @property
    def sent_bytes(self) -> int:
        """What the device sends to others."""
        return sum(each.nbytes for each in self.collectives)


def count_costs(module: Module, runs: Runs, *, devices: int) -> Costs:
    """Counts a program.

    Args:
        module: the program of one device.
        runs: how often its computations run.
        devices: of the whole mesh, which is the group of collectives that name none.
    """
    fused = {
        called
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if each.opcode == "fusion"
        for called in each.calls
    }
    flops = matrix_flops = hbm_bytes = 0
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for computation in module.computations.values():
        times = runs.times.get(computation.name, 0)
        if not times:
            continue
        for each in computation.instructions.values():
            own = product_flops(computation, each)
            flops += times * own
            matrix_flops += times * own * _passes(computation, each)
            if computation.name not in fused:
                hbm_bytes += times * moved_bytes(module, computation, each)
            if (kind := _collective_kind(computation, each)) is not None:
                group = _group_size(each, devices)
                count, nbytes = found.get((kind, group), (0, 0))
                sent = _sent_bytes(computation, each, kind, group)
                found[kind, group] = count + times, nbytes + times * sent
    collectives = [Collective(kind, group, *totals) for (kind, group), totals in found.items()]
    return Costs(
        flops,
        matrix_flops,
        hbm_bytes,
        tuple(sorted(collectives, key=lambda each: -each.nbytes)),
        len(runs.unknown),
    )


def product_flops(computation: Computation, instruction: Instruction) -> int:
    """Two for each product that is summed, in matrix products or by themselves; what a custom call declares; else 0."""
    if instruction.opcode == "custom-call":
        return int(instruction.attribute(r'"flops":\s*"?(\d+)') or 0)
    if instruction.opcode == "dot":
        left, *_ = _operand_shapes(computation, instruction)
        contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        depth = math.prod(left.dims[int(axis)] for axis in contracted.split(",") if axis)
        return 2 * instruction.shapes[0].size * depth
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if (
        instruction.opcode == "reduce"
    ):  # the product of a matrix with one vector is compiled to sums of products
        summed = _behind(computation, computation.instructions[instruction.operands[0]])
        return 2 * summed.shapes[0].size if summed.opcode == "multiply" else 0
    return 0


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """TPU programs write products as convolutions, with heads as dilated spatial axes: only what meets counts."""
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|$)")
    assert labels is not None, instruction.name
    left_labels, right_labels, out_labels = re.split(r"_|->", labels)
    left, right = _operand_shapes(computation, instruction)
    (out,) = instruction.shapes
    spatial = [label for label in out_labels if label.isdigit()]
    meetings = math.prod(
        _meetings(
            left.dims[left_labels.index(label)],
            right.dims[right_labels.index(label)],
            out.dims[out_labels.index(label)],
            _window(instruction, int(label)),
        )
        for label in spatial
    )
    rows, columns = out.dims[out_labels.index("b")], out.dims[out_labels.index("f")]
    return 2 * rows * columns * right.dims[right_labels.index("i")] * meetings


@dataclasses.dataclass(frozen=True)
class _Window:
    """How a convolution walks one axis."""

    stride: int
    padding: int
    left_dilation: int
    right_dilation: int


def _window(instruction: Instruction, axis: int) -> _Window:
    text = instruction.attribute(r"window=\{([^}]*)\}") or ""

    def number(name: str, default: int) -> int:
        found = re.search(rf"{name}=(\S+)", text)
        return int(found[1].split("x")[axis].split("_")[0]) if found else default

    return _Window(number("stride", 1), number("pad", 0), number("lhs_dilate", 1), number("rhs_dilate", 1))


def _meetings(left: int, right: int, out: int, window: _Window) -> int:
    """Pairs of an output and a kernel position that meet an input, and no padding or hole."""
    reach = (left - 1) * window.left_dilation
    return sum(
        0 <= (place := o * window.stride - window.padding + k * window.right_dilation) <= reach
        and place % window.left_dilation == 0
        for o in range(out)
        for k in range(right)
    )


def _passes(computation: Computation, instruction: Instruction) -> int:
    """How often the matrix unit goes over a product."""
    precision = instruction.attribute(r"operand_precision=\{(\w+)") or ""
    if precision not in _PASSES or instruction.opcode not in ("dot", "convolution"):
        return 1
    wide = any(shape.dtype == "f32" for shape in _operand_shapes(computation, instruction))
    return _PASSES[precision] if wide else 1


def moved_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """What an instruction reads from and writes to main memory.

    An array that is only sliced counts by its slices, and one that is updated in place by the update.
    """
    opcode = instruction.opcode
    if opcode in _MOVES_NOTHING or opcode.endswith("-done"):
        return 0
    if opcode == "custom-call" and (declared := instruction.attribute(r'"bytes_accessed":\s*"?(\d+)')):
        return int(declared)
    operands = [computation.instructions[name] for name in instruction.operands]
    if opcode == "fusion" and len(instruction.calls) == 1:
        return _fusion_bytes(module, module.computations[instruction.calls[0]], instruction, operands)
    if opcode in _SLICES:
        read = min(_hbm(instruction.shapes, of=operands[0].shapes), _hbm(operands[0].shapes))
        return read + _hbm(instruction.shapes)
    if opcode == "dynamic-update-slice":
        return _hbm(operands[1].shapes) + _hbm(operands[1].shapes, of=instruction.shapes)
    if opcode == "copy-start" or opcode.startswith(COLLECTIVES):
        # The result of a start repeats its operand, and ends in what the machine needs for itself.
        results = (
            instruction.shapes[1:] if opcode.endswith("-start") and len(instruction.shapes) > 1 else None
        )
        if opcode == "copy-start":
            results = instruction.shapes[:1]
        written = _hbm(instruction.shapes if results is None else results)
        return sum(_hbm(operand.shapes) for operand in operands) + written
    if opcode == "slice-start":
        return 2 * sum(shape.nbytes for shape in instruction.shapes[-1:])
    return sum(_hbm(operand.shapes) for operand in operands) + _hbm(instruction.shapes)


def _fusion_bytes(
    module: Module, fused: Computation, instruction: Instruction, operands: list[Instruction]
) -> int:
    root = fused.root
    if _ASYNC_START in root.attributes:  # all that a collective reads and writes, at its start
        return _hbm(instruction.shapes[:2])
    if _ASYNC_DONE in root.attributes:
        return 0
    total = sum(
        min(operand_bytes, _read_bytes(module, fused, parameter))
        for parameter, operand in zip(fused.parameters, operands, strict=True)
        if (operand_bytes := _hbm(operand.shapes))
    )
    results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for shape, result in zip(instruction.shapes, results, strict=False):
        total += 0 if shape.memory_space else min(shape.nbytes, _written_bytes(module, fused, result))
    return total


def _read_bytes(module: Module, fused: Computation, value: Instruction) -> int:
    """What a fusion reads of an array that it is given."""
    total = 0
    for user in fused.users()[value.name]:
        places = [place for place, name in enumerate(user.operands) if name == value.name]
        if user.opcode == "bitcast":
            total += _read_bytes(module, fused, user)
        elif user.opcode == "fusion":
            inner = module.computations[user.calls[0]]
            handed_on = _behind(inner, inner.root, through=("bitcast",))
            for parameter in (inner.parameters[place] for place in places):
                total += _read_bytes(module, inner, parameter)
                if handed_on is parameter:
                    total += _read_bytes(module, fused, user)
        elif user.opcode in _SLICES and places == [0]:
            total += user.shapes[0].nbytes
        elif user.opcode == "dynamic-update-slice" and places == [0]:
            pass  # it is updated where it lies
        elif user.opcode == "tuple" or _in_flight(user):
            pass  # it is handed on
        else:
            total += sum(shape.nbytes for shape in value.shapes)
    return total


def _written_bytes(module: Module, fused: Computation, result: Instruction) -> int:
    """What a fusion writes of one of its results."""
    result = _behind(fused, result)
    if result.opcode == "parameter" or _in_flight(result):
        return 0
    if result.opcode == "fusion" and len(result.shapes) == 1:
        inner = module.computations[result.calls[0]]
        return _written_bytes(module, inner, inner.root)
    if result.opcode == "dynamic-update-slice":
        return fused.instructions[result.operands[1]].shapes[0].nbytes
    return sum(shape.nbytes for shape in result.shapes)


def _behind(
    computation: Computation, value: Instruction, *, through: tuple[str, ...] = ("bitcast", "copy", "convert")
) -> Instruction:
    """What a value is, seen through copies in other types and shapes."""
    while value.opcode in through and value.operands:
        value = computation.instructions[value.operands[0]]
    return value


def _in_flight(instruction: Instruction) -> bool:
    """Whether it stands for a collective that was begun before and goes on beside the work of its fusion."""
    return "chain_id=" in instruction.attributes


def _hbm(shapes: Iterable[Shape], *, of: tuple[Shape, ...] | None = None) -> int:
    """Bytes in main memory; with `of`, as if they lay where those shapes do."""
    if of is not None and any(shape.memory_space for shape in of):
        return 0
    return sum(shape.nbytes for shape in shapes if of is not None or not shape.memory_space)


def _operand_shapes(computation: Computation, instruction: Instruction) -> list[Shape]:
    return [computation.instructions[name].shapes[0] for name in instruction.operands]


def _collective_kind(computation: Computation, instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    if _in_flight(instruction) and _ASYNC_START not in computation.root.attributes:
        return None  # counted where it begins
    # The TPU compiler scatters sums in a fusion of an all-reduce and the slice of it.
    scattered = kind == "all-reduce" and "all-reduce-scatter" in computation.name
    return "reduce-scatter" if scattered else kind


def _group_size(instruction: Instruction, devices: int) -> int:
    attributes = instruction.attributes
    if "source_target_pairs" in attributes:
        return 2
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", found[2]))
    return devices


def _sent_bytes(computation: Computation, instruction: Instruction, kind: str, group: int) -> int:
    """What each device sends: in a ring, all parts but one go past it, and for a sum that all get, twice."""
    operands = sum(shape.nbytes for shape in _operand_shapes(computation, instruction))
    others = group - 1
    return {
        "all-gather": operands * others,
        "all-reduce": 2 * operands * others // max(1, group),
        "reduce-scatter": operands * others // max(1, group),
        "all-to-all": operands * others // max(1, group),
    }.get(kind, operands)
