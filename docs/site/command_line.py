"""Write docs/reference/command-line.md: the help of each command, as the commands print it.

.venv/bin/python docs/site/command_line.py
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "reference" / "command-line.md"
#: each command, an example, and the page that explains it
COMMANDS = (
    ("plan", "shardwright plan --parameters 7B --ranks 8 --gpu h100", "../choosing.md"),
    ("run", "torchrun --nproc-per-node 2 -m shardwright run zero2 program.py", "../howto/accelerate.md"),
    ("config", "shardwright config ds_config.json --ranks 8", "../deepspeed.md"),
    ("doctor", "shardwright doctor", "../troubleshooting.md"),
    ("why", "shardwright why", "../observing.md#when-it-hangs"),
    ("top", "shardwright top", "../observing.md#when-it-hangs"),
    ("trace", "shardwright trace --steps 5 -- torchrun --nproc-per-node 2 program.py", "../observing.md#a-trace-of-a-few-steps"),
    ("report", "shardwright report runs/a", "../observing.md#a-page-of-a-run"),
    ("scale", "shardwright scale -- torchrun --nproc-per-node 8 program.py", "../observing.md#what-more-ranks-bring"),
    ("ckpt", "shardwright ckpt ls runs/a", "../checkpoints.md"),
    ("ckpt ls", "shardwright ckpt ls runs/a", "../checkpoints.md"),
    ("ckpt inspect", "shardwright ckpt inspect runs/a/step-000100 --tensors", "../checkpoints.md"),
    ("ckpt verify", "shardwright ckpt verify runs/a", "../checkpoints.md#verify"),
    ("ckpt diff", "shardwright ckpt diff runs/a/step-000100 runs/b/step-000100", "../checkpoints.md"),
    ("ckpt import", "shardwright ckpt import model.pt runs/a/step-000000", "../checkpoints.md#other-programs-checkpoints"),
    ("ckpt export", "shardwright ckpt export runs/a/step-000100 folder --to hf", "../checkpoints.md#other-programs-checkpoints"),
    ("ckpt prune", "shardwright ckpt prune runs/a --keep-last 2", "../checkpoints.md"),
    ("rank", "torchrun --no-python --nproc-per-node 8 shardwright rank -- python train.py", "../operations.md#without-a-restart"),
    ("chaos", "shardwright chaos --plan faults.toml -- torchrun --nproc-per-node 2 --max-restarts 9 train.py", "../operations.md#trying-it-chaos"),
    ("completion", "shardwright completion bash > ~/.local/share/bash-completion/completions/shardwright", "#completion-of-commands"),
    ("kernels", "shardwright kernels --arch 80 90 --to FOLDER", "../features.md#gpus"),
    ("gpu-check", "shardwright gpu-check --to FOLDER", "../features.md#gpus"),
)  # fmt: skip
HEAD = """# Command line

What each command prints for `--help`, on 100 columns. No command needs a network; `ckpt ls`, `inspect`, `verify` and `prune` need no
torch.

## Completion of commands

`pip install 'shardwright[completion]'`, then write the script of your shell once per version, and start a new shell:

```bash
shardwright completion bash > ~/.local/share/bash-completion/completions/shardwright
shardwright completion zsh > ~/.zfunc/_shardwright   # and fpath+=~/.zfunc before compinit in ~/.zshrc
shardwright completion fish > ~/.config/fish/completions/shardwright.fish
```

It completes commands, options, the values of those that take one of a few, and files.
"""


def help_of(command: str) -> str:
    """Return what `shardwright COMMAND --help` prints on 100 columns."""
    from shardwright_tools.cli import main

    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return printed.getvalue().strip()


def page() -> str:
    parts = [HEAD]
    for command, example, explained in COMMANDS:
        parts.append(f"## {command}\n\n`{example}` ([more]({explained}))\n\n```text\n{help_of(command)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.argv[0] = "shardwright"
    PAGE.write_text(page(), encoding="utf-8")
