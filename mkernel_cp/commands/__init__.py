"""What the command line does: one module per command, and how a job of several ranks ends."""


def spelled(operator: str) -> str:
    """Return an operator's name as the command line has it: with dashes."""
    return operator.replace("_", "-")
