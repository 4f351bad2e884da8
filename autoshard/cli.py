"""The command line: ``autoshard explain | compare | verify | emit | run TARGET``, ``autoshard diff PLAN PLAN`` and ``autoshard profile``.

Results go to stdout, progress to stderr. Exit status: 0 done; 1 the answer is no (unequal, nothing fits); 2 an error or wrong usage, and
the last thing on stderr is then ``autoshard: error: ...``. Like ``diff``, diff gives 1 where something differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings

from autoshard.errors import AutoshardError, InfeasibleError
from autoshard.mesh import SHARDED_AXES, Mesh
from autoshard.schedule import SCHEDULES

DONE, NO, ERROR = 0, 1, 2

PIPELINED = tuple(name for name in SCHEDULES if name != "none")


class UsageError(AutoshardError):
    """A flag has a value that it can't have."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.print_usage(sys.stderr)
        self.exit(ERROR, f"autoshard: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """All commands and their flags; the same flag means the same thing everywhere."""
    top = Parser(prog="autoshard", description="Plan and run parallel training of a PyTorch model on a mesh of devices.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = _shared_flags()

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[shared])

    explain = command("explain", "find the plan, and say what it does and costs")
    explain.add_argument("--all", action="store_true", help="list every op, and every collective with its reason")
    asked = explain.add_mutually_exclusive_group()
    asked.add_argument("--why", metavar="NODE", help="why an op, module, parameter or input is placed as it is, and what else there was")
    asked.add_argument(
        "--why-not", action="append", default=[], metavar="NODE=AXIS:PLACEMENT",
        help="plan again with a placement forced, as --pin does, and say what gets worse; may be repeated",
    )  # fmt: skip

    command("compare", "put the plans of other frameworks, on as many devices, beside ours")

    diff = commands.add_parser("diff", help="say how two plans differ", description="Say how two plans differ.")
    for name in ("before", "after"):
        diff.add_argument(name, metavar=name.upper(), help="a plan (JSON, as `explain --format json` prints it)")
    diff.add_argument("--format", choices=("text", "json"), default="text", help="of the result (default: text)")

    verify = command("verify", "train on local processes and on one device, and compare")
    verify.add_argument("--steps", type=_positive, metavar="N", default=3, help="optimizer steps (default: 3)")
    verify.add_argument("--dtype", choices=("fp32", "fp64"), default="fp32", help="dtype of the comparison (default: fp32)")
    verify.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the model and its inputs (default: 0)")
    verify.add_argument("--backend", choices=("processes", "local"), default="processes", help="how the ranks run (default: processes)")

    emit = command("emit", "write the Python module that each rank runs")
    emit.add_argument("--output", metavar="FOLDER", default="emitted", help="where to write them (default: emitted)")

    run = command("run", "train on the example batch: under torchrun, or on processes of this machine")
    run.add_argument("--steps", type=_positive, metavar="N", default=10, help="optimizer steps, of AdamW (default: 10)")
    run.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the model and its inputs (default: 0)")
    run.add_argument("--nproc", type=_positive, metavar="N", help="processes to start; must be the size of the mesh, which is the default")

    text = "measure this machine, and write it down as a cluster to plan for with --cluster FILE"
    profile = commands.add_parser("profile", help=text, description=f"{text[0].upper()}{text[1:]}.")
    profile.add_argument("--processes", type=_positive, metavar="N", default=8, help="at most so many side by side (default: 8)")
    profile.add_argument("--output", metavar="FILE", default="cluster.toml", help="where to write it (default: cluster.toml)")
    return top


def _shared_flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("target", metavar="TARGET", help="module:function or file.py:function; it returns (model, example_inputs)")
    flags.add_argument("--mesh", metavar="D,T,P", help="sizes of data,tensor,pipeline, for example 4,2,2; or a number of devices, or auto")
    flags.add_argument("--cluster", metavar="NAME", help="hardware to plan for, for example a100-dgx")
    flags.add_argument("--memory", metavar="SIZE", help="limit on a rank's memory, for example 40GiB (default: the cluster's)")
    flags.add_argument("--microbatches", type=_positive, metavar="M", help="pieces to cut the batch into (default: the solver decides)")
    flags.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="of forward and backward (default: fp32, as the model is)")
    flags.add_argument("--zero", metavar="LEVEL", default="auto", help="ZeRO over data: 0, 1, 2, 3 or auto (default: what is best)")
    flags.add_argument("--recompute", metavar="WHEN", default="auto", help="layers in backward: on, off or auto (default: what is best)")
    flags.add_argument("--offload", metavar="WHAT", default="auto", help="to the host: optimizer, off or auto (default: what must)")
    flags.add_argument("--random", choices=("invariant", "native"), help="dropout masks: invariant to the mesh (default), or torch's own")
    flags.add_argument(
        "--schedule", metavar="NAME", default="auto", help=f"of the pipeline: {', '.join(PIPELINED)} or auto (default: what is best)"
    )
    flags.add_argument(
        "--pin", action="append", default=[], metavar="NAME=AXIS:PLACEMENT",
        help="force a placement, for example lm_head.weight=tensor:S(0); may be repeated",
    )  # fmt: skip
    flags.add_argument("--plan", metavar="FILE", help="use this plan (JSON, as `explain --format json` prints it) instead of searching")
    flags.add_argument("--format", choices=("text", "json"), default="text", help="of the result (default: text)")
    return flags


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    with warnings.catch_warnings():
        warnings.showwarning = _warner()
        return _guarded(argv)


def _guarded(argv: list[str] | None) -> int:
    """Run one command; whatever is raised becomes a sentence and an exit status."""
    debug = os.environ.get("AUTOSHARD_DEBUG", "") not in ("", "0")
    try:
        arguments = parser().parse_args(argv)
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except AutoshardError as error:
        if debug:
            traceback.print_exc()
        print(f"autoshard: error: {error}", file=sys.stderr)
        return NO if isinstance(error, InfeasibleError) else ERROR
    except KeyboardInterrupt:
        print("autoshard: error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `autoshard explain ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"autoshard: error: internal error: {type(error).__name__}: {error}", file=sys.stderr)
        print("  hint: this is a bug in autoshard; AUTOSHARD_DEBUG=1 shows the traceback to report", file=sys.stderr)
        return ERROR


def _warner():
    """Prints each warning once, as one sentence of autoshard's own, without Python's line of code."""
    seen = set()

    def show(message, category, filename, lineno, file=None, line=None):
        if str(message) not in seen:
            seen.add(str(message))
            print(f"autoshard: warning: {message}", file=file or sys.stderr)

    return show


def _run(arguments: argparse.Namespace) -> int:
    options = _options(arguments) if "target" in arguments else {}
    from autoshard import commands  # after the flags are known to be right: torch takes seconds to load

    return getattr(commands, arguments.command)(arguments, options)


def _options(arguments: argparse.Namespace) -> dict:
    """The keyword arguments of ``autoshard.plan`` that the flags ask for; flags that were not given are left out."""
    _only(arguments.zero, "--zero", ("0", "1", "2", "3", "auto"))
    _only(arguments.recompute, "--recompute", ("on", "off", "auto"))
    _only(arguments.offload, "--offload", ("optimizer", "off", "auto"))
    _only(arguments.schedule, "--schedule", (*PIPELINED, "auto"))
    _only(getattr(arguments, "backend", "processes"), "--backend", ("processes", "local"))
    given = {name: getattr(arguments, name) for name in ("cluster", "memory", "microbatches", "precision", "random", "plan")}
    options = {name: value for name, value in given.items() if value is not None}
    if arguments.mesh is not None:
        options["mesh"] = Mesh.wanted(arguments.mesh)
    elif arguments.plan is None:
        raise UsageError("no mesh", hint="give --mesh data,tensor,pipeline, for example --mesh 4,2,2")
    if arguments.plan is not None:
        if arguments.command == "compare" or getattr(arguments, "why_not", None):
            what = "compare makes its plans" if arguments.command == "compare" else "--why-not plans again"
            raise UsageError(f"{what} from the flags, not from a --plan", hint="leave --plan out, and give the flags that it was made with")
        settled = [flag for flag in ("cluster", "memory", "microbatches", "precision", "random", "pin") if getattr(arguments, flag)]
        settled += [flag for flag in ("zero", "recompute", "schedule", "offload") if getattr(arguments, flag) != "auto"]
        if settled:
            raise UsageError(f"--{settled[0]} can't change a plan that is made", hint="leave it out, or leave --plan out")
    if arguments.zero != "auto":
        options["zero"] = int(arguments.zero)
    for name in ("recompute", "schedule", "offload"):
        if getattr(arguments, name) != "auto":
            options[name] = getattr(arguments, name)
    if arguments.pin:
        options["pin"] = _pins(arguments.pin)
    if getattr(arguments, "why_not", None):
        arguments.forced = _pins(arguments.why_not)
    return options


def _only(value: str, flag: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise UsageError(f"{flag} can't be {value!r}", hint=f"{flag} takes {' or '.join(possible)}")


def _pins(texts: list[str]) -> dict[str, dict[str, str]]:
    from autoshard.placement import parse_placement

    pins: dict[str, dict[str, str]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        axis, colon, placement = rest.partition(":")
        if not (equals and colon and name) or axis not in SHARDED_AXES:
            hint = f"write NAME=AXIS:PLACEMENT with an axis of {', '.join(SHARDED_AXES)}, for example lm_head.weight=tensor:S(0)"
            raise UsageError(f"can't read the pin {text!r}", hint=hint)
        placement = str(parse_placement(placement))
        if pins.setdefault(name, {}).setdefault(axis, placement) != placement:
            raise UsageError(f"{name} is pinned to both {pins[name][axis]} and {placement} along {axis}")
    return pins


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


if __name__ == "__main__":
    sys.exit(main())
