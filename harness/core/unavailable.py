"""The exception that is raised for a method or a model that this machine cannot run."""


class Unavailable(Exception):
    """Raised if the method or the model cannot run on this machine. The text names the reason and, if a command helps,
    this command."""
