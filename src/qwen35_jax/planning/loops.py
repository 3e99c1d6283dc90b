"""How often each computation of a compiled program runs: loop bodies as many times as their loops go round."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from qwen35_jax.planning.hlo import Computation, Instruction, Module

_THROUGH = frozenset({"copy", "bitcast", "convert", "copy-done", "copy-start", "reshape"})
"""What hands on a whole number as it is."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often computations run in one execution of a program.

    Attributes:
        times: of each computation that the program runs: the entry, branches, loop bodies and conditions, fusions.
            What is applied to elements, as the sum of a reduction, is not among them.
        unknown: loops whose number of trips depends on data.
    """

    times: Mapping[str, int]
    unknown: tuple[str, ...]


def count_runs(module: Module, *, trips_where_unknown: int = 1) -> Runs:
    """Counts the runs of every computation.

    Args:
        module: the program.
        trips_where_unknown: of loops whose number of trips the text does not tell.
    """
    times: dict[str, int] = {module.entry: 1}
    unknown: list[str] = []
    for computation in reversed(module.computations.values()):  # callers first
        count = times.get(computation.name, 0)
        if not count:
            continue
        for each in computation.instructions.values():
            if each.opcode == "while":
                trips = trip_count(module, computation, each)
                if trips is None:
                    unknown.append(each.name)
                    trips = trips_where_unknown
                condition, body = _loop(each)
                _add(times, body, count * trips)
                _add(times, condition, count * (trips + 1))
            elif each.opcode in ("fusion", "call", "conditional", "async-start", "custom-call"):
                for called in each.calls:
                    _add(times, called, count)
    return Runs(times, tuple(unknown))


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a `while` goes round; None if that depends on data.

    A loop that counts compares its counter with a bound, begins at a known number and adds a known one each time.
    """
    if known := loop.attribute(r'"known_trip_count":\s*\{"n":\s*"(\d+)"'):
        return int(known)
    condition, body = (module.computations[name] for name in _loop(loop))
    compared = condition.root
    if compared.opcode == "fusion":
        compared = module.computations[compared.calls[0]].root
    if compared.opcode != "compare" or compared.attribute(r"direction=(\w+)") != "LT":
        return None
    start = computation.instructions[loop.operands[0]]
    indices = [_element(condition, operand) for operand in condition.root.operands]
    counters = [index for index in indices if index is not None and _step(module, body, index)]
    if len(counters) != 1:
        return None
    (counter,) = counters
    bound = next(
        (
            value
            for operand in condition.root.operands
            if _element(condition, operand) != counter
            and (value := _value(module, condition, operand, computation, start)) is not None
        ),
        None,
    )
    first = _value(module, computation, _operand(computation, start, counter), None, None)
    step = _step(module, body, counter)
    if bound is None or first is None or not step:
        return None
    return max(0, -(-(bound - first) // step))


def _loop(loop: Instruction) -> tuple[str, str]:
    condition, body = (loop.attribute(rf"{name}=%?([\w.\-]+)") for name in ("condition", "body"))
    assert condition is not None and body is not None, loop.name
    return condition, body


def _add(times: dict[str, int], name: str, count: int) -> None:
    times[name] = times.get(name, 0) + count


def _operand(computation: Computation, start: Instruction, index: int) -> str:
    """The name of an element of a loop's first tuple."""
    return start.operands[index] if start.opcode == "tuple" else ""


def _through(computation: Computation, name: str) -> Instruction | None:
    """The instruction behind copies."""
    found = computation.instructions.get(name)
    while found is not None and found.opcode in _THROUGH and found.operands:
        found = computation.instructions.get(found.operands[0])
    return found


def _element(computation: Computation, name: str) -> int | None:
    """Which element of the loop's tuple a value in its body or condition is, if it is one."""
    found = _through(computation, name)
    if found is None or found.opcode != "get-tuple-element":
        return None
    if computation.instructions[found.operands[0]].opcode != "parameter":
        return None
    return int(found.attribute(r"index=(\d+)") or 0)


def _value(
    module: Module,
    computation: Computation,
    name: str,
    outer: Computation | None,
    start: Instruction | None,
) -> int | None:
    """A whole number that stands in the text: a constant, or an element that the loop was begun with and keeps."""
    found = _through(computation, name)
    if found is None:
        return None
    if found.opcode == "constant":
        return int(found.literal) if re.fullmatch(r"-?\d+", found.literal) else None
    index = _element(computation, name)
    if index is not None and outer is not None and start is not None:
        return _value(module, outer, _operand(outer, start, index), None, None)
    return None


def _step(module: Module, body: Computation, index: int) -> int | None:
    """What a trip adds to an element of the loop's tuple: 0 for one that it hands on, None for anything else."""
    root = body.root
    if root.opcode != "tuple":
        return None
    return _added(module, body, root.operands[index], index, {})


def _added(
    module: Module, computation: Computation, name: str, index: int, inputs: Mapping[str, int]
) -> int | None:
    """How much larger a value is than the loop's element `index`.

    Args:
        module: the program.
        computation: the body, or a fusion in it.
        name: of the value.
        index: of the element.
        inputs: in a fusion, its parameters that are known to be the element plus so much.
    """
    found = _through(computation, name)
    if found is None:
        return None
    if found.name in inputs:
        return inputs[found.name]
    if _element(computation, name) == index:
        return 0
    if found.opcode == "add":
        for one, other in (found.operands, found.operands[::-1]):
            step = _value(module, computation, other, None, None)
            before = None if step is None else _added(module, computation, one, index, inputs)
            if step is not None and before is not None:
                return before + step
    if found.opcode == "fusion" and len(found.shapes) == 1:
        fused = module.computations[found.calls[0]]
        known = {
            parameter.name: added
            for parameter, operand in zip(fused.parameters, found.operands, strict=True)
            if (added := _added(module, computation, operand, index, inputs)) is not None
        }
        return _added(module, fused, fused.root.name, -1, known)
    return None
