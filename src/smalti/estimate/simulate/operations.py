"""What each scalar operation of a bundle does, as a Python expression over its operands.

Registers hold 32-bit words as Python ints from 0 to 2³²−1; predicates hold 0 or 1. A value that is
not known, because it came out of a vector register or of memory nobody wrote, is an `Unknown`: it
passes through arithmetic, and is an error where the control flow asks for it.
"""

import re

from smalti.estimate.errors import UnknownOperation, Unstated

WORD = 0xFFFFFFFF
SIGN = 0x80000000


class Unknown:
    """A word that the schedule alone does not tell. `why` says where it came from."""

    def __init__(self, why: str):
        self.why = why

    def _word(self, *_):
        return self

    def _bit(self, *_):
        return UnknownBit(self.why)

    def __and__(self, other):
        # Nothing is left of it: compilers switch dummy values off that way.
        return other if isinstance(other, int) and other == 0 else self

    __rand__ = __and__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _word
    __or__ = __ror__ = __xor__ = __rxor__ = _word
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _word
    __lt__ = __le__ = __gt__ = __ge__ = _bit

    # Comparisons of words, not of objects.
    __eq__ = __ne__ = _bit  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]  # an address that is not known is no key

    def __bool__(self):
        raise Unstated(f"the control flow depends on {self.why}")


class UnknownBit(Unknown):
    """A predicate that is not known: `or` with one that holds is known again."""

    def __or__(self, other):
        return other if isinstance(other, int) and other == 1 else self

    __ror__ = __or__


def shift_left(value, by):
    if isinstance(by, Unknown):
        return by
    return (value << by) & WORD if by < 32 else 0


def shift_right(value, by):
    if isinstance(by, Unknown):
        return by
    return value >> by


def shift_right_signed(value, by):
    if isinstance(by, Unknown):
        return by
    return (((value ^ SIGN) - SIGN) >> min(by, 31)) & WORD


def least(a, b):
    return select(a < b, a, b)


def greatest(a, b):
    return select(a < b, b, a)


def select(condition, then, otherwise):
    """A choice by a value that may be unknown, which is no branch."""
    if isinstance(condition, Unknown):
        return condition
    return then if condition else otherwise


def leading_zeros(value):
    return value if isinstance(value, Unknown) else 32 - value.bit_length()


def quotient_and_remainder(a, b) -> tuple:
    """Of words without sign. What a division by zero gives is not known."""
    for value in (a, b):
        if isinstance(value, Unknown):
            return value, value
    if b == 0:
        unknown = Unknown("the result of a division by zero")
        return unknown, unknown
    return divmod(a, b)


def _signed(comparison: str) -> str:
    return f"({{0}} ^ {SIGN}) {comparison} ({{1}} ^ {SIGN})"


# By opcode: {0}, {1}, … stand for the arguments.
EXPRESSIONS = {
    "smov": "{0}",
    "pmov": "{0}",
    "sadd.s32": f"({{0}} + {{1}}) & {WORD}",
    "ssub.s32": f"({{0}} - {{1}}) & {WORD}",
    "smul.u32": f"({{0}} * {{1}}) & {WORD}",
    "smin.u32": "least({0}, {1})",
    "smax.u32": "greatest({0}, {1})",
    "sand.u32": "{0} & {1}",
    "sor.u32": "{0} | {1}",
    "sxor.u32": "{0} ^ {1}",
    "sshll.u32": "shift_left({0}, {1})",
    "sshrl.u32": "shift_right({0}, {1})",
    "sshra.s32": "shift_right_signed({0}, {1})",
    "scmp.eq.s32.totalorder": "{0} == {1}",
    "scmp.ne.s32.totalorder": "{0} != {1}",
    "scmp.lt.s32.totalorder": _signed("<"),
    "scmp.le.s32.totalorder": _signed("<="),
    "scmp.gt.s32.totalorder": _signed(">"),
    "scmp.ge.s32.totalorder": _signed(">="),
    "scmp.lt.u32.totalorder": "{0} < {1}",
    "scmp.le.u32.totalorder": "{0} <= {1}",
    "scmp.gt.u32.totalorder": "{0} > {1}",
    "scmp.ge.u32.totalorder": "{0} >= {1}",
    "sc.u32": f"({{0}} + {{1}}) > {WORD}",  # the carry of an addition
    "pnand": "1 ^ ({0} & {1})",
    "por": "{0} | {1}",
    "pneg": "1 ^ {0}",
    "sclz": "leading_zeros({0})",
    "scalar_select": "{1} if {0} else {2}",  # see `choose`
}
MEMORIES = ("hbm", "vmem", "smem", "cmem")  # the last is v4's
EXPRESSIONS |= {f"scalar_lea.{space}": f"({{0}} + {{1}}) & {WORD}" for space in MEMORIES}
EXPRESSIONS["scalar_lea.sflag"] = f"({{0}} + {{1}}) & {WORD}"

# Floating point is not computed: its values go into vectors, and an `Unknown` names them elsewhere.
FLOATS = ("scvt.s32.f32", "scvt.f32.s32", "sadd.f32", "ssub.f32", "smul.f32", "smin.f32")
FLOATS += ("smax.f32", "sceil.f32", "sfloor.f32", "strunc.f32")
FLOAT_COMPARISONS = tuple(
    f"scmp.{kind}.f32.partialorder" for kind in ("eq", "ne", "lt", "le", "gt", "ge")
)

# The physical register is the same before and after: nothing happens.
RENAMES = ("sphi", "pphi", "int_to_ptr.sflag", *(f"int_to_ptr.{space}" for space in MEMORIES))

# Order memory or the scheduler, trace, or check alignment: they take their slot and change nothing
# that a simulation without data keeps.
NOTHING = (
    *("sfence", "cfence", "compiler-scheduling-barrier", "vtrace", "vsettm", "vsetiar.raw.iar0"),
    *("vsetiar.raw.iar1", "set.rngseed"),
)
NOTHING_PREFIXES = ("vset.pattern", "vpush")  # what is pushed, `spop` takes as not known

_FLOAT = re.compile(r"-?(\d+\.\d*(e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)")
_SYMBOL = re.compile(r"\[?#allocation(\d+)(_spill)?(?:\s*\+\s*\$(0x[0-9a-f]+))?\]?")
_ADDRESS = re.compile(r"\[(?:smem:)?(.*)\]")
REGISTERS = (*(f"s{i}" for i in range(64)), *(f"p{i}" for i in range(32)))
_REGISTER = re.compile(rf"!?%[a-z]+\d+_({'|'.join(REGISTERS)})")


class Addresses:
    """Gives every allocation a base address, far enough apart that none runs into the next.

    A base is the allocation's rank times 2¹⁸: more units than a core's VMEM has, and small enough
    that `<< 4`, by which pointers are made, stays a positive 32-bit word. Spilled scalars, of which
    there can be thousands, are never pointed into.
    """

    SPACING = 1 << 18
    LIMIT = 1 << 9

    def __init__(self):
        self._ranks: dict[tuple[str, bool], int] = {}
        self._counts = {False: 0, True: self.LIMIT}

    def base(self, number: str, spilled: bool) -> int:
        key = (number, spilled)
        if key not in self._ranks:
            self._counts[spilled] += 1
            self._ranks[key] = self._counts[spilled]
            if self._counts[False] >= self.LIMIT:
                raise UnknownOperation(f"over {self.LIMIT} allocations: their addresses do not fit")
        return self._ranks[key] * self.SPACING


def register(argument: str) -> str | None:
    """The physical register behind an SSA name: `%s37_s25` → `s25`, `!%p38_p0` → `p0`."""
    match = _REGISTER.fullmatch(argument)
    return match and match[1]


def term(argument: str, addresses: Addresses, where: str) -> str:
    """One argument as a Python expression: a register, a number, or an allocation's address."""
    if name := register(argument):
        return f"(1 ^ {name})" if argument.startswith("!") else name
    if re.fullmatch(r"-?\d+", argument):
        return str(int(argument) & WORD)
    if re.fullmatch(r"\$0x[0-9a-f]+", argument):
        return str(int(argument[1:], 16))
    if symbol := _SYMBOL.fullmatch(argument):
        offset = int(symbol[3], 16) if symbol[3] else 0
        return str(addresses.base(symbol[1], bool(symbol[2])) + offset)
    if _FLOAT.fullmatch(argument):
        return f"Unknown('the number {argument} in floating point')"
    raise UnknownOperation(f"{where}: the operand {argument!r} is of a kind that is not known")


def choose(condition: str, then: str, otherwise: str) -> str:
    """`select` of a predicate's term, written out: a call would cost a quarter of all time."""
    if negated := re.fullmatch(r"\(1 \^ (p\d+)\)", condition):
        condition, then, otherwise = negated[1], otherwise, then
    if not re.fullmatch(r"p\d+", condition):
        return f"select({condition}, {then}, {otherwise})"
    return (
        f"({condition} if {condition}.__class__ is UnknownBit else "
        f"({then}) if {condition} else ({otherwise}))"
    )


def address(argument: str, addresses: Addresses, where: str) -> str:
    """`[smem:[%s1_s18 + $0x4]]` → `(s18 + 4)`."""
    inner = argument
    while match := _ADDRESS.fullmatch(inner):
        inner = match[1].strip()
    parts = [part.strip() for part in inner.split("+")]
    terms = [term(part, addresses, where) for part in parts]
    if all(part.isdecimal() for part in terms):
        return str(sum(map(int, terms)))
    return "(" + " + ".join(terms) + ")"
