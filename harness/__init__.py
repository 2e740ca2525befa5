"""Runs any method of training a model larger than the device, and tells the truth about it."""
