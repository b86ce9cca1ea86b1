"""What went wrong, for the person who can mend it."""


class UserError(Exception):
    """Something the user can mend: one line that says what, where, and what to do instead.

    Programmers' mistakes are ``assert``s and ordinary exceptions, with a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # one line, whatever the parts held


def first_line(error: BaseException) -> str:
    """What an error of another library says, without its essay."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
