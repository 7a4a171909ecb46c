"""What ends a run, and with which exit code."""

SUCCESS, CHECK_FAILED, USAGE, UNAVAILABLE = 0, 1, 2, 3


class CompareError(Exception):
    """One sentence for the user."""

    exit_code = USAGE


class UnavailableError(CompareError):
    """Something that the run needs is not there."""

    exit_code = UNAVAILABLE
