"""What the stopwatch says when it cannot answer. A wrong argument is a ValueError instead."""


class EstimateError(Exception):
    """No estimate: its text says why, and what to do; the command line prints it in one line."""


class CompilerMissing(EstimateError):
    """libtpu, the TPU compiler, is not installed."""


class CompileFailed(EstimateError):
    """The compiler refused the program, or died on it.

    `compiler_message` keeps all that the compiler printed.
    """

    def __init__(self, text: str, compiler_message: str = ""):
        super().__init__(text)
        self.compiler_message = compiler_message


class DumpUnreadable(EstimateError):
    """A dump is cut short, damaged, or in a format that this version does not know."""


class UnknownOperation(EstimateError):
    """A schedule holds an operation whose effect is not known; it is named, not guessed."""


class SimulationFailed(EstimateError):
    """The kernel halted, waits for ever, or ended with copies under way."""


class Unstated(EstimateError):
    """The time depends on what is not in the program: a trip count, a branch, an operand."""
