"""What a plan costs: seconds of compute and of communication, bytes of memory, the time of a pipelined step. Estimates, in plain numbers.

Formulas are written beside their functions; all figures come from ``autoshard.cluster``. Nothing here chooses anything.
"""
