"""autoshard: takes any PyTorch model and a mesh of devices, and works out how to train it in parallel.

The public names are loaded on first use, so that importing ``autoshard.runtime`` (all that emitted code needs) loads no solver.
"""

from __future__ import annotations

import importlib

_PUBLIC = {
    "AutoshardError": "autoshard.errors",
    "Mesh": "autoshard.mesh",
    "Plan": "autoshard.planning.plan",
    "compile": "autoshard.compiler",
    "invariant_random": "autoshard.runtime.drawing",
    "plan": "autoshard.compiler",
    "load": "autoshard.runtime.checkpoint",
    "register_rule": "autoshard.rules",
    "save": "autoshard.runtime.checkpoint",
    "verify": "autoshard.verifier",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
