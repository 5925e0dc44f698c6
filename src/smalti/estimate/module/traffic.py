"""Bytes that one XLA operation reads and writes, from what its text says: mostly from above.

Each operand and each result counts once, with the padding of its tiles. A fusion that only slices
an operand reads the slices; one that updates a slice in place (`aliasing_operands` in its
backend_config says so) writes the update and does not read the rest. The compiler says no more, so
what a fusion skips in other ways is counted too much, and what it reads twice, as a product whose
operand is streamed again for each tile, too little; a gather reads at least what it returns.
"""

from smalti.estimate.module.hlo import Computation, Instruction, Module
from smalti.estimate.module.shapes import Shape

_READS_A_PART = ("dynamic-slice", "slice", "gather")


def bytes_touched(
    module: Module, computation: Computation, i: Instruction, space: int | None
) -> tuple[int, int]:
    """(read, written) in one memory space by one execution of an instruction of `computation`.

    `space` is HBM, say; None means all memories together.
    """
    if i.opcode == "dynamic-update-slice":
        whole, update = (computation.by_name[name].shape for name in i.operands[:2])
        read = 0 if 0 in _in_place(i) else whole.stored_in(space)
        written = _like(i.shape, update if 0 in _in_place(i) else i.shape, space)
        return read + update.stored_in(space), written
    if i.opcode in _READS_A_PART:
        source = computation.by_name[i.operands[0]].shape
        return _like(source, i.shape, space), i.shape.stored_in(space)
    body = None
    if i.opcode == "fusion":
        body = module.computations[i.called[0]]
    read = 0
    for number, name in enumerate(i.operands):
        whole = computation.by_name[name].shape.stored_in(space)
        if whole and body is not None:
            sliced = _sliced(module, body, number, number in _in_place(i))
            if sliced is not None and not sliced[1]:
                whole = min(whole, sliced[0])
        read += whole
    written = i.shape.stored_in(space)
    if written and body is not None and _in_place(i):
        written = _written_of(body, i, space)
    return read, written


def _in_place(i: Instruction) -> dict[int, int]:
    """Operands whose memory a result takes over: their number to that of the result."""
    pairs = {}
    for entry in i.backend.get("aliasing_operands", {}).get("lists", []):
        indices = [int(index) for index in entry.get("indices", [])]
        for operand in indices:
            for result in indices:
                if operand < len(i.operands) <= result:
                    pairs[operand] = result - len(i.operands)
    return pairs


def _like(place: Shape, amount: Shape, space: int | None) -> int:
    """The bytes of `amount`, if `place` is an array in that memory space."""
    return amount.stored_bytes if place.stored_in(space) else 0


def _sliced(
    module: Module, body: Computation, number: int, in_place: bool
) -> tuple[int, bool] | None:
    """What a fused computation reads of its parameter, where it does nothing but slice it.

    Returns the bytes of the slices, and whether the parameter also is the result; None where
    anything else reads it.
    """
    total, is_result = 0, False
    pending = [body.parameters[number]]
    while pending:
        value = pending.pop()
        is_result |= value is body.root
        for user in body.instructions:
            if value.name not in user.operands:
                continue
            first = user.operands[0] == value.name and value.name not in user.operands[1:]
            if first and user.opcode in _READS_A_PART:
                total += user.shape.stored_bytes
            elif user.opcode == "bitcast":
                pending.append(user)
            elif user.opcode == "fusion":
                inner_body = module.computations[user.called[0]]
                for position, name in enumerate(user.operands):
                    if name == value.name:
                        inner = _sliced(module, inner_body, position, False)
                        if inner is None:
                            return None
                        total += inner[0]
                        if inner[1]:
                            pending.append(user)
            elif not (first and in_place and user.opcode == "dynamic-update-slice"):
                return None
    return total, is_result


def _written_of(body: Computation, i: Instruction, space: int | None) -> int:
    """Bytes a fusion writes, where some results are slices updated in place."""
    results = [body.root.name]
    if body.root.opcode == "tuple":
        results = list(body.root.operands)
    leaves = i.shape.leaves
    if len(results) != len(leaves):
        return i.shape.stored_in(space)
    written = 0
    for number, (name, leaf) in enumerate(zip(results, leaves, strict=True)):
        if not leaf.stored_in(space):
            continue
        made_by = body.by_name[name]
        while made_by.opcode == "bitcast":
            made_by = body.by_name[made_by.operands[0]]
        if made_by.opcode == "dynamic-update-slice" and number in _in_place(i).values():
            written += body.by_name[made_by.operands[1]].shape.stored_bytes
        else:
            written += leaf.stored_bytes
    return written
