"""Every command answers wrong input with one sentence and exit code 2 or 1, never with a traceback, and has --help."""

import json
import shutil
import subprocess
import sys

import pytest
from shardwright._version import __version__
from shardwright_tools.cli import main

COMMANDS = (
    "plan",
    "why",
    "top",
    "trace",
    "report",
    "scale",
    "doctor",
    "ckpt",
    "kernels",
    "config",
    "run",
    "chaos",
    "completion",
)


def ended(capsys, *words):
    """Return the exit code of a command, and what it printed."""
    try:
        code = main(list(words))
    except SystemExit as ending:
        code = ending.code
    found = capsys.readouterr()
    return code, found.out + found.err


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["run", "zero7", "x.py"], 2, "options 'zero7': zero must be 0, 1, 2 or 3, got 7"),
        (["run", "zero=2,stage=3", "x.py"], 2, "unknown option 'stage': did you mean 'zero'"),
        (["run", "{folder}/none.yaml", "x.py"], 2, "No such file"),
        (["run", "{folder}/bad.yaml", "x.py"], 2, "bad.yaml is not YAML: "),
        (["run", "{folder}/bad.json", "x.py"], 2, "bad.json is not JSON: "),
        (["run", "zero2", "{folder}/nofile.py"], 2, "nofile.py' does not exist: pass its path behind the options"),
        (["run", "zero2", "{folder}"], 2, "has no __main__.py"),
        (["run", "zero2", "-m", "shardwright_no.such"], 2, "no module named 'shardwright_no.such'"),
        (["run"], 2, "no program given"),
        (["chaos", "--plan", "{folder}/none.json", "--", "true"], 2, "none.json: No such file"),
        (["chaos", "--plan", "{folder}/bad.json", "--", "true"], 2, "bad.json is not JSON: "),
        (
            ["chaos", "--plan", "{folder}/plan.json", "--", "{folder}/nocommand"],
            2,
            "nocommand' was not found, or is not executable",
        ),
        (
            ["chaos", "--plan", "{folder}/plan.json", "--report", "{folder}/no/x", "--", "true"],
            2,
            "no folder to write it to",
        ),
        (["config", "{folder}/none.json"], 1, "No such file"),
        (["config", "{folder}/bad.json"], 1, "bad.json"),
        (["config", "{folder}/list.json"], 1, "list.json"),
        (["config", "{folder}"], 1, "Is a directory"),
        (["config"], 2, "pass a file"),
        (["kernels", "--arch", "3"], 2, "is not a compute capability of at least"),
        (["kernels", "--arch", "80", "--to", "/dev/null/x"], 2, "--to /dev/null/x: Not a directory"),
        (["ckpt", "ls", "{folder}/none"], 2, "is not a directory"),
        (["ckpt", "verify", "{folder}"], 2, "holds no checkpoint"),
        (["why", "{folder}/none"], 2, "there is no account of a job"),
        (["why", "{folder}"], 2, "has no account of a rank"),
        (["why", "1"], 2, "there is no account of a job '1'"),
        (["top", "{folder}"], 2, "has no account of a rank"),
        (["doctor", "extra"], 2, "unrecognized arguments: extra"),
        (["cure"], 2, "invalid choice: 'cure'"),
    ],
)
def test_wrong_input_is_one_sentence(capsys, tmp_path, monkeypatch, words, code, sentence):
    monkeypatch.setenv("SHARDWRIGHT_OPTIONS", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))  # where `why` looks for jobs
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))  # restores sys.path, to which `run` adds
    monkeypatch.setattr("sys.argv", ["shardwright"])
    pytest.importorskip("accelerate")
    (tmp_path / "bad.yaml").write_text("a: [b\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "plan.json").write_text(json.dumps({"fault": [{"kind": "kill", "rank": 0, "step": 1}]}))
    found, printed = ended(capsys, *(word.format(folder=tmp_path) for word in words))
    assert found == code and sentence in printed and "Traceback" not in printed, printed


def test_the_version_is_the_packages(capsys):
    assert ended(capsys, "--version") == (0, f"shardwright {__version__}\n")


@pytest.mark.parametrize("words", [*([each] for each in COMMANDS), ["ckpt", "ls"], ["gpu-check"]], ids=" ".join)
def test_every_command_has_help(capsys, monkeypatch, words):
    monkeypatch.setattr("sys.argv", ["shardwright"])
    code, printed = ended(capsys, *words, "--help")
    assert code == 0 and "usage: " in printed


#: what a shell answers to "shardwright WORDS<tab>", printed line by line
SHELLS = {
    "bash": "source {script}; COMP_WORDS=(shardwright {words}); COMP_CWORD={last}; _shtab_shardwright; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    "fish": "source {script}; complete -C 'shardwright {line}'",
    "zsh": "zsh -n {script}",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_and_values(shell, capsys, tmp_path):
    pytest.importorskip("shtab")
    code, script = ended(capsys, "completion", shell)
    assert code == 0 and "--keep-last" in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    (tmp_path / "script").write_text(script)

    def answer(*words):
        line = SHELLS[shell].format(
            script=tmp_path / "script", words=" ".join(words), last=len(words), line=" ".join(words)
        )
        done = subprocess.run([shell, "-c", line], capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return {each.partition("\t")[0].strip() for each in done.stdout.splitlines()}

    if shell == "zsh":  # its answers need a terminal: the script is parsed
        assert answer() == set()
        return
    assert {"doctor", "ckpt"} <= answer("")
    assert "doctor" in answer("doc") and "ckpt" not in answer("doc")
    assert "--keep-last" in answer("ckpt", "prune", "--keep-l")
    assert answer("ckpt", "export", "--to", "h") == {"hf"}


def test_completion_without_shtab_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert ended(capsys, "completion", "bash") == (1, "completion needs shtab: pip install 'shardwright[completion]'\n")
