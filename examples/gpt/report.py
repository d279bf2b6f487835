"""The output of a run: a progress bar on a terminal, plain lines elsewhere, a loss curve.

Only one rank prints. tqdm and matplotlib are optional.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

Points = list[tuple[int, float]]


class Reporter:
    """The progress of one run.

    Parameters
    ----------
    enabled : bool
        False on all ranks but one: all methods then do nothing.
    first_step, last_step : int
        The first step of the run, and the last possible one.
    """

    def __init__(self, *, enabled: bool, first_step: int, last_step: int) -> None:
        self.enabled = enabled
        self.bar = None
        if enabled and tqdm is not None and sys.stderr.isatty():
            self.bar = tqdm(initial=first_step, total=last_step, unit="step", dynamic_ncols=True)

    def say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line)
        elif self.enabled:
            print(line, flush=True)

    def trained(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Advance the bar; without a bar, `validated` prints lines."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix_str(f"train {loss:.3f}, {tokens_per_s:,.0f} tokens/s")

    def validated(self, step: int, train: Points, validation: float, tokens_per_s: float) -> None:
        """Print the state of the run; the training loss is the mean of the last 100 steps."""
        recent = [loss for _, loss in train[-100:]]
        self.say(
            f"step {step:5d}   validation {validation:.3f} nats/byte"
            f"   train {sum(recent) / len(recent):.3f}   {tokens_per_s:,.0f} tokens/s"
        )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def printable(text: bytes) -> str:
    """Decode sampled bytes; a character that could steer the terminal becomes U+FFFD."""
    decoded = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in decoded)


def draw_loss_curve(path: Path, train: Points, validation: Points) -> str:
    """Draw both losses over the steps; return a line about the result."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "loss curve: skipped, matplotlib is not installed"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats/byte", title="Byte-level GPT")
    axes.plot(*zip(*train), color="tab:blue", alpha=0.35, linewidth=0.8, label="training batch")
    axes.plot(*zip(*validation), color="tab:orange", marker="o", markersize=3, label="validation")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return f"loss curve: {path}"
