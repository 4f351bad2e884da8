"""AUTOSHARD_LOGS: what to say on stderr, in the grammar of TORCH_LOGS.

``AUTOSHARD_LOGS="passes,+plan"``: comma-separated parts, each at level INFO, with ``+`` at DEBUG, with ``-`` at ERROR only; ``all`` is
all of them. At DEBUG a pass prints the program it gives.
"""

from __future__ import annotations

import logging
import os

from autoshard.errors import AutoshardError

PARTS = ("passes", "plan")
LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}


def logger(part: str) -> logging.Logger:
    """The logger of a part; configured from the environment when first asked for."""
    log = logging.getLogger(f"autoshard.{part}")
    if not getattr(log, "configured", False):
        log.configured = True
        level = levels(os.environ.get("AUTOSHARD_LOGS", "")).get(part)
        if level is not None:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
            log.addHandler(handler)
            log.setLevel(level)
            log.propagate = False
    return log


def levels(text: str) -> dict[str, int]:
    """Level by part. Raises AutoshardError for a part that does not exist."""
    found: dict[str, int] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        level = LEVELS.get(word[0], logging.INFO)
        name = word.lstrip("+-")
        if name != "all" and name not in PARTS:
            raise AutoshardError(f"AUTOSHARD_LOGS names {name!r}", hint=f"the parts are all, {', '.join(PARTS)}")
        found.update({part: level for part in (PARTS if name == "all" else (name,))})
    return found
