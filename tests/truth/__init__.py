"""Predictions against measurements: ``python -m tests.truth memory`` and ``python -m tests.truth time``, on processes of this machine."""
