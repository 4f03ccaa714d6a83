"""The one error that a user may see without a traceback."""


class Eagle3Error(Exception):
    """A condition that the user can mend.

    The message says what was expected, what came, and what to do. Commands print it alone and exit with 1; anything
    else that is raised is a defect of ours and keeps its traceback.
    """
