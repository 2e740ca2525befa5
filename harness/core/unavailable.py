"""The exception for a method or model that this machine cannot run."""


class Unavailable(Exception):
    """The method or the model cannot run on this machine; the text names the reason and the command that helps."""
