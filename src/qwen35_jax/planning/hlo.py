"""Reads the text of a compiled program: its computations, their instructions, and how often each computation runs.

Only what costs are counted from is kept: shapes, which of them lie in the device's main memory, operands, and the
computations that an instruction calls.

Source: the text format of https://openxla.org/xla/operation_semantics and of `HloModule::ToString` in XLA.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

ELEMENT_BITS = {"pred": 8, "token": 0, "opaque": 0, "f8e4m3b11fnuz": 8}
"""Bits of the element types whose name does not tell them, as it does for `f32`, `bf16` or `u4`."""

_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=\s]*)\](\{[^}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"(?:calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of an instruction's result.

    Attributes:
        dtype: element type as HLO spells it.
        dims: sizes, outermost first.
        memory_space: 0 is the device's main memory; others are on the chip, or the host's.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements alone, without what a tiled layout adds."""
        return -(-self.size * _bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: unique in its module.
        shapes: of its result, several for a tuple.
        opcode: e.g. `fusion`.
        operands: names of instructions of the same computation; for a constant or a parameter, none.
        literal: what stands between the parentheses: the value of a constant, the number of a parameter.
        attributes: everything after the operands.
        is_root: whether its result is that of its computation.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it runs or applies."""
        branches = _BRANCHES.search(self.attributes)
        listed = re.split(r"[,\s]+", branches[1]) if branches else []
        return (*_CALLED.findall(self.attributes), *(name.lstrip("%") for name in listed if name))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order of the text."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(each for each in reversed(self.instructions.values()) if each.is_root)

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """By their number."""
        found = [each for each in self.instructions.values() if each.opcode == "parameter"]
        return tuple(sorted(found, key=lambda each: int(each.literal)))

    def users(self) -> Mapping[str, list[Instruction]]:
        """The instructions that take each one's result."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for each in self.instructions.values():
            for operand in dict.fromkeys(each.operands):
                found[operand].append(each)
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program. `computations` are in the order of the text, in which callers follow what they call."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is not None and line.startswith("}"):
            current = None
        elif current is not None:
            if instruction := _instruction(line):
                current[instruction.name] = instruction
        elif (head := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
            current = {}
            computations[head[2]] = Computation(head[2], current)
            entry = head[2] if head[1] else entry
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opened = rest.index("(", type_end)
    closed = _closing(rest, opened)
    inside = rest[opened + 1 : closed]
    opcode = rest[type_end:opened].strip()
    named = opcode not in ("constant", "parameter")
    return Instruction(
        name=head[2],
        shapes=tuple(_shapes(rest[:type_end])),
        opcode=opcode,
        operands=tuple(_NAME.findall(inside)) if named else (),
        literal="" if named else inside,
        attributes=rest[closed + 1 :],
        is_root=bool(head[1]),
    )


def _closing(text: str, opened: int) -> int:
    """Where the parenthesis closes that opens at `opened`."""
    depth = 0
    for found in re.finditer(r"[()]", text[opened:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return opened + found.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[opened : opened + 80]!r}")


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        space = _MEMORY_SPACE.search(layout)
        sizes = tuple(int(size.strip().lstrip("<=")) for size in dims.split(",") if size.strip())
        yield Shape(dtype, sizes, int(space[1]) if space else 0)


def _bits(dtype: str) -> int:
    if dtype in ELEMENT_BITS:
        return ELEMENT_BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0
