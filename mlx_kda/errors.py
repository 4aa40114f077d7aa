"""User-facing errors."""


class UserError(Exception):
    """A user's mistake or a damaged file: one line saying what was wrong and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class CheckpointError(UserError):
    """A checkpoint that cannot be used: missing, damaged, unsupported, or with unknown tensors."""
