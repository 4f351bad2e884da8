"""The command line: its flags (frozen as text), exit status, streams, and what it hands on."""

import argparse
import json
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from toy_plan import toy_plan

import autoshard
from autoshard import cli
from autoshard.errors import InfeasibleError, PlanError
from autoshard.mesh import Mesh
from autoshard.target import TargetError, load_target

HERE = Path(__file__).parent
TOY = f"{HERE / 'toy_target.py'}:toy"
FLAGS = HERE / "goldens" / "cli_flags.txt"


def flags_as_text() -> str:
    """Every command and flag, independent of how the Python version lays out --help."""
    commands = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    lines = []
    for name, parser in commands.items():
        lines.append(f"{name}: {parser.description}")
        for action in parser._actions[1:]:  # the first is --help
            names = ", ".join(action.option_strings) or action.metavar
            takes = action.metavar or "{" + ",".join(action.choices or ()) + "}"
            value = f" {takes}" if action.option_strings and action.nargs != 0 else ""
            lines.append(f"  {names}{value} [{action.default}] {action.help}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def calls(monkeypatch):
    """A compiler and a verifier that only note what they were asked for."""
    seen = []

    def note(name, result):
        return lambda *args, **kwargs: seen.append((name, args, kwargs)) or result

    report = types.SimpleNamespace(equal=True, text=lambda: "equal", to_json=lambda: {"equal": True})
    files = [Path("code/plan.json"), Path("code/rank0.py")]
    compiler = types.SimpleNamespace(plan=note("plan", toy_plan()), emit_folder=note("emit", files))
    verifier = types.SimpleNamespace(verify=note("verify", report), report=report)
    for name, module in (("compiler", compiler), ("verifier", verifier)):
        monkeypatch.setitem(sys.modules, f"autoshard.{name}", module)
        monkeypatch.setattr(autoshard, name, module, raising=False)
    return types.SimpleNamespace(seen=seen, compiler=compiler, verifier=verifier)


def test_flags_are_frozen():
    assert flags_as_text() == FLAGS.read_text(), "the flags changed: if that is meant, write the golden again (its text is above)"


def test_explain_prints_text_on_stdout_and_nothing_else(calls, capsys):
    assert cli.main(["explain", TOY, "--mesh", "2,2,2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("GPT2LMHeadModel: 124 M parameters on mesh 2,2,2") and "\x1b" not in out and err == ""
    ((_, _, kwargs),) = calls.seen
    assert sorted(kwargs) == ["example_inputs", "mesh"] and kwargs["mesh"] == Mesh(2, 2, 2)
    assert sorted(kwargs["example_inputs"]) == ["target", "x"]


def test_explain_json_is_the_plan_that_other_commands_read(calls, capsys, tmp_path):
    assert cli.main(["explain", TOY, "--mesh", "2,2,2", "--format", "json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text) == json.loads(json.dumps(toy_plan().to_json()))
    (tmp_path / "plan.json").write_text(text)
    assert cli.main(["verify", TOY, "--plan", str(tmp_path / "plan.json")]) == 0
    assert calls.seen[-1][2]["plan"] == toy_plan() and calls.seen[-1][2]["mesh"] == Mesh(2, 2, 2)
    assert cli.main(["verify", TOY, "--mesh", "4,2", "--plan", str(tmp_path / "plan.json")]) == 2
    assert "the plan is for mesh 2,2,2, not for 4,2,1" in capsys.readouterr().err


def test_flags_reach_the_planner(calls):
    pins = ["--pin", "lm_head.weight=tensor:S(0)", "--pin", "lm_head.weight=data:R", "--pin", "x=data:S(0)"]
    flags = ["--mesh", "4,2", "--cluster", "a100-dgx", "--memory", "40GiB", "--microbatches", "8", "--zero", "2"]
    flags += ["--recompute", "off", *pins]
    assert cli.main(["explain", TOY, *flags]) == 0
    kwargs = calls.seen[0][2]
    assert kwargs.pop("example_inputs")
    pin = {"lm_head.weight": {"tensor": "S(0)", "data": "R"}, "x": {"data": "S(0)"}}
    assert kwargs == {
        "mesh": Mesh(4, 2, 1), "cluster": "a100-dgx", "memory": "40GiB", "microbatches": 8, "zero": 2, "recompute": "off", "pin": pin
    }  # fmt: skip


@pytest.mark.parametrize(
    "flags, said",
    [
        ([], "no mesh"),
        (["--mesh", "2,x"], "can't read the mesh '2,x'"),
        (["--mesh", "0,2"], "mesh axis 'data' has size 0"),
        (["--mesh", "0"], "no mesh has 0 devices"),
        (["--mesh", "auto"], 'mesh "auto" is the number of processes'),
        (["--mesh", "2", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["--mesh", "2,1", "--microbatches", "0"], "argument --microbatches: '0' is not a positive integer"),
        (["--mesh", "2,1", "--precision", "int3"], "argument --precision: invalid choice: 'int3'"),
        (["--mesh", "2,1", "--zero", "4"], "--zero can't be '4'"),
        (["--mesh", "2,1", "--recompute", "yes"], "--recompute can't be 'yes'"),
        (["--mesh", "2,1", "--pin", "weight=S(0)"], "can't read the pin 'weight=S(0)'"),
        (["--mesh", "2,1", "--pin", "weight=pipeline:S(0)"], "can't read the pin"),
        (["--mesh", "2,1", "--pin", "weight=data:S"], "can't read the placement 'S'"),
        (["--mesh", "2,1", "--pin", "w=data:R", "--pin", "w=data:S(0)"], "w is pinned to both R and S(0) along data"),
        (["--plan", "/nowhere.json"], "can't read the plan '/nowhere.json'"),
        (["--plan", "p.json", "--memory", "1GiB"], "--memory can't change a plan that is made"),
        (["--plan", "p.json", "--precision", "bf16"], "--precision can't change a plan that is made"),
        (["--plan", "p.json", "--zero", "0"], "--zero can't change a plan that is made"),
    ],
)
def test_wrong_usage(flags, said, capsys):
    try:
        status = cli.main(["explain", TOY, *flags])
    except SystemExit as stop:  # argparse's own errors
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err[err.rindex("autoshard: error: ") :].startswith(f"autoshard: error: {said}") and "Traceback" not in err


@pytest.mark.parametrize(
    "target, said",
    [
        ("toy_target.py", "can't read the target"),
        ("nowhere.py:toy", "there is no file 'nowhere.py'"),
        ("no_such_module:toy", "there is no module 'no_such_module'"),
        (f"{HERE / 'toy_target.py'}:toys", "has no function 'toys'"),
        ("toy_target:NOT_A_FUNCTION", "something that is no function"),
        ("toy_target:only_a_model", "returned a model without example inputs"),
        ("toy_target:nonsense", "returned a tuple of 2, not"),
        ("toy_target:wrong_inputs", "example inputs of type Tensor"),
        ("toy_target:wants_an_argument", "can't be called without arguments"),
        ("toy_target:raises", "calling toy_target:raises failed: ValueError: out of flour"),
    ],
)
def test_wrong_targets(target, said):
    with pytest.raises(TargetError, match="(?s)" + said.replace("(", r"\(")):
        load_target(target)


def test_a_failing_target_is_shown_with_its_own_line():
    with pytest.raises(TargetError, match=r"toy_target.py:\d+: raise ValueError"):
        load_target("toy_target:raises")


def test_a_target_with_a_syntax_error(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(TargetError, match=r"(?s)SyntaxError.*broken\.py:2"):
        load_target(f"{tmp_path / 'broken.py'}:f")


def test_a_target_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("from toy_target import toy\n")
    (tmp_path / "main.py").write_text("from beside import toy\n")
    model, inputs = load_target(f"{tmp_path / 'main.py'}:toy")
    assert type(model).__name__ == "Toy" and list(inputs) == ["x", "target"]


def test_verify_exits_1_when_unequal(calls, capsys):
    assert cli.main(["verify", TOY, "--mesh", "2,1", "--dtype", "fp64", "--steps", "5", "--seed", "7"]) == 0
    name, args, kwargs = calls.seen[0]
    assert (kwargs["steps"], kwargs["seed"], str(kwargs["dtype"])) == (5, 7, "torch.float64")
    assert args == (TOY,) and kwargs["mesh"] == Mesh(2, 1, 1)
    calls.verifier.report.equal = False
    assert cli.main(["verify", TOY, "--mesh", "2,1", "--format", "json"]) == 1
    assert capsys.readouterr().out == 'equal\n{\n "equal": true\n}\n'


def test_emit_prints_the_paths(calls, capsys, tmp_path):
    folder = tmp_path / "code"
    assert cli.main(["emit", TOY, "--mesh", "2,1", "--output", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["code/plan.json", "code/rank0.py"]
    assert lines[2].startswith("run it: torchrun --nproc-per-node ") and lines[2].endswith(str(folder))
    (tmp_path / "file").write_text("")
    assert cli.main(["emit", TOY, "--mesh", "2,1", "--output", str(tmp_path / "file")]) == 2


def test_run_checks_the_number_of_processes(calls, capsys):
    assert cli.main(["run", TOY, "--mesh", "2,2,2", "--nproc", "4"]) == 2
    assert "mesh 2,2,2 has 8 ranks, but --nproc is 4" in capsys.readouterr().err


@pytest.mark.parametrize("error, status", [(PlanError("no"), 2), (InfeasibleError("needs 3 GiB"), 1), (KeyError("x"), 2)])
def test_exit_status_of_errors(calls, capsys, monkeypatch, error, status):
    def fail(*args, **kwargs):
        raise error

    calls.compiler.plan = fail
    assert cli.main(["explain", TOY, "--mesh", "2,1"]) == status
    out, err = capsys.readouterr()
    expected = "internal error: KeyError: 'x'" if isinstance(error, KeyError) else str(error)
    assert out == "" and err.startswith(f"autoshard: error: {expected}") and "Traceback" not in err
    monkeypatch.setenv("AUTOSHARD_DEBUG", "1")
    cli.main(["explain", TOY, "--mesh", "2,1"])
    assert "Traceback" in capsys.readouterr().err


def test_help_is_quick_and_loads_no_torch():
    code = "import sys; from autoshard import cli; cli.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_closed_pipe_is_no_error():
    code = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from toy_plan import toy_plan
from autoshard import cli, commands
commands._plan = lambda *args: (None, None, toy_plan())
sys.exit(cli.main(["explain", "x:y", "--mesh", "2,2,2", "--all"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0


def test_the_installed_command():
    script = Path(sys.executable).parent / "autoshard"
    done = subprocess.run([script, "explain", TOY], capture_output=True, text=True, timeout=60, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("autoshard: error: no mesh\n  hint: give --mesh")


def test_a_warning_is_one_sentence(calls, capsys):
    def plan(*args, **kwargs):
        for _ in range(2):
            warnings.warn("aten.fft has no rule", stacklevel=1)
        return toy_plan()

    calls.compiler.plan = plan
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["explain", TOY, "--mesh", "2,1"]) == 0
    assert capsys.readouterr().err == "autoshard: warning: aten.fft has no rule\n"


# --- with the real compiler ----------------------------------------------------------------------------------------------


def test_explain_emit_and_a_saved_plan(capsys, tmp_path):
    assert cli.main(["explain", TOY, "--mesh", "2,1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Toy: 280 parameters on mesh 2,1,1 = 2 ranks of ") and "Memory per rank" in out
    folder = tmp_path / "code"
    assert cli.main(["emit", TOY, "--mesh", "2,1", "--output", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == sorted(map(str, folder.iterdir())) and (folder / "rank1.py").exists()
    assert cli.main(["explain", TOY, "--plan", str(folder / "plan.json"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "plan.json").read_text())
    assert cli.main(["explain", f"{HERE / 'toy_target.py'}:wider", "--plan", str(folder / "plan.json")]) == 2
    assert "the plan was made for another Toy, batch or version" in capsys.readouterr().err


def test_run_trains_on_local_processes(capfd):
    assert cli.main(["run", TOY, "--mesh", "2,1", "--steps", "3", "--format", "json"]) == 0
    out, err = capfd.readouterr()
    losses = json.loads(out)["losses"]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert err.splitlines() == [f"step {i + 1}/3: loss {loss:.6g}" for i, loss in enumerate(losses)]


@pytest.mark.slow
def test_run_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autoshard.cli", "run", TOY]
    done = subprocess.run([*command, "--mesh", "2,1", "--steps", "2"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and re.match(r"loss \S+ -> \S+ in 2 steps of AdamW on one batch\n\S+ samples/s", done.stdout)
    assert done.stdout.count("loss") == 1  # rank 0 speaks for all
