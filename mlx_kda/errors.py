"""The errors that a user can cause and mend."""


class UserError(Exception):
    """A mistake of the user's or a fault in a file: one line saying what was wrong and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class CheckpointError(UserError):
    """A checkpoint that cannot be used: missing, damaged, unknown, or not fully accounted for."""
