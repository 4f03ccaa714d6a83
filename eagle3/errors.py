"""The one error that a user may see without a traceback, and pydantic's errors in its words."""

from pydantic import ValidationError


class Eagle3Error(Exception):
    """A condition that the user can mend.

    The message says what was expected, what came, and what to do. Commands print it alone and exit with 1; anything
    else that is raised is a defect of ours and keeps its traceback.
    """


def first_fault(error: ValidationError, whole: str = "the file") -> tuple[str, str]:
    """The first field that does not fit, dotted (`whole`: the document itself), and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    return ".".join(str(part) for part in first["loc"]) or whole, first["msg"].removeprefix("Value error, ")
