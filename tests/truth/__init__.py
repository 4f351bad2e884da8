"""Predictions against measurements, and training against one device, on processes of this machine: ``python -m tests.truth --help``."""
