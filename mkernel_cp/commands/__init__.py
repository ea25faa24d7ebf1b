"""What the command line does: one module per command, and how a job of several ranks ends."""
