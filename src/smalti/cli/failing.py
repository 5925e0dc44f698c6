"""A command that ends without an answer. A wrong argument is a ValueError, as elsewhere."""

STOPPED = "stopped; what was compiled is kept, and the same command goes on from there"


class Failed(Exception):
    """Ends the command with one line; `details` are what --verbose shows before it."""

    def __init__(self, text: str, code: int = 1, details: str = ""):
        super().__init__(text)
        self.code = code
        self.details = details
