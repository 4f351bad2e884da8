"""What the command line works on: a function of the user's that returns a model and its example inputs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from autoshard.errors import AutoshardError

FORM = "write module:function or file.py:function; the function takes nothing and returns (model, example_inputs)"


class TargetError(AutoshardError):
    """The target can't be found, fails, or returns something else than a model and its inputs."""


def load_target(text: str) -> tuple[nn.Module, dict | tuple]:
    """Import the target and call it: (model, example inputs), a dict of keyword arguments or a tuple of positional ones.

    Raises:
        TargetError: no such file, module or function; it raised (naming the user's line); or it returned something else.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(f"can't read the target {text!r}", hint=FORM)
    function = getattr(_module(place), name, None)
    if not callable(function):
        what = "has no function" if function is None else "has something that is no function under the name"
        raise TargetError(f"{place} {what} {name!r}", hint=FORM)
    return _checked(_call(text, function), text)


def _module(place: str):
    try:
        if place.endswith(".py"):
            return _file(Path(place))
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script does not
        return importlib.import_module(place)
    except AutoshardError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise TargetError(f"there is no module {error.name!r}", hint=FORM) from None
        raise _failed(f"importing {place}", error) from error
    except (Exception, SystemExit) as error:
        raise _failed(f"importing {place}", error) from error


def _file(path: Path):
    if not path.is_file():
        raise TargetError(f"there is no file {str(path)!r}", hint=FORM)
    path = path.resolve()
    name = f"autoshard_target_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` does, for the modules beside it
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _call(text: str, function):
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TargetError(f"{text} can't be called without arguments: {error}", hint=FORM) from None
    except ValueError:
        pass  # a builtin without a signature: calling it will tell
    try:
        return function()
    except AutoshardError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(f"calling {text}", error) from error


def _checked(result, text: str) -> tuple[nn.Module, dict | tuple]:
    if isinstance(result, nn.Module):
        raise TargetError(f"{text} returned a model without example inputs", hint="return (model, example_inputs): a dict, or a tuple")
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"{type(result).__name__}"
        raise TargetError(f"{text} returned {kind}, not (model, example_inputs)", hint=FORM)
    model, inputs = result
    if isinstance(inputs, Mapping):
        return model, dict(inputs)
    if isinstance(inputs, tuple):
        return model, inputs
    raise TargetError(
        f"{text} returned example inputs of type {type(inputs).__name__}", hint="a dict of keyword arguments, or a tuple of positional ones"
    )


def _failed(doing: str, error: BaseException) -> TargetError:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"{last[0].filename}:{last[0].lineno}: {last[0].line}" if last else None
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    return TargetError(f"{doing} failed: {type(error).__name__}: {error}", where=where)
