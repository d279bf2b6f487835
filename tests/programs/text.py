"""What a random program is: Python text, made of a setup and of statements.

The engine's ranks and the oracle run the same text; so does a person who has the file. A statement is drawn as a kind and two small
numbers, without knowledge of the others; render() gives those their text that make sense where they stand and leaves the others out.
So any part of a program is a program, which is what lets a failing one shrink.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

#: what is sliced; "private" is zero=3 with parameters of each rank's own
STAGES = ("0", "1", "2", "3", "private")
SHARED = ("3",)
PRIVATE = ("private",)
SLICED_GRADIENTS = ("2", "3", "private")
SLICED = ("1", *SLICED_GRADIENTS)
WRAP_OPTIONS = {
    **{stage: f"zero={stage}" for stage in STAGES[:4]},
    "private": "zero=3, share_parameters=False, units=nn.Linear",
}

MODELS = {
    "mlp": """\
module = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 19), nn.Tanh(), nn.Linear(19, 5))
def loss(model, k):
    return model(x(k)).square().mean()
""",
    "heads": """\
class Heads(nn.Module):  # ranks use different parameters
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(7, 11), nn.Linear(11, 3), nn.Linear(11, 3)
    def forward(self, x, left=True):
        return (self.left if left else self.right)(torch.tanh(self.body(x)))
module = Heads()
def loss(model, k):
    return model(x(k), (rank + k) % 3 != 0).square().mean()
""",
    "odd": """\
class Odd(nn.Module):  # tied, scalar, frozen, tiny and transposed parameters, and one that nobody uses
    def __init__(self):
        super().__init__()
        self.first, self.tied, self.again = nn.Linear(7, 13), nn.Linear(13, 13), nn.Linear(13, 13)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(13, 11).t())
        self.unused = nn.Linear(3, 3)
    def forward(self, x):
        x = torch.tanh(self.first(x)) @ self.turned.t() @ self.turned
        return self.again(torch.relu(self.tied(self.frozen(x)))) * self.scalar
module = Odd()
def loss(model, k):
    return model(x(k)).square().mean()
""",
    "norm": """\
class Norm(nn.Module):  # buffers, and parameters in channels_last
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(7, 36)
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)
    def forward(self, x):
        x = self.conv(self.lift(x).view(-1, 4, 3, 3)).flatten(1)
        return self.last(torch.tanh(self.norm(x)))
module = Norm()
def loss(model, k):
    return model(x(k)).square().mean()
""",
    "low": """\
def x(k):
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * k + rank)).bfloat16()
module = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 19), nn.Tanh(), nn.Linear(19, 5)).bfloat16()
def loss(model, k):
    return model(x(k)).float().square().mean()
""",
}

OPTIMIZERS = {
    "SGD": "torch.optim.SGD({}, lr=0.1, momentum=0.9, nesterov=True)",
    "AdamW": "torch.optim.AdamW({}, lr=0.01)",
    "fused": "torch.optim.AdamW({}, lr=0.01, weight_decay=0.1, fused=True)",
    "Adagrad": "torch.optim.Adagrad({}, lr=0.05)",
    "sw.AdamW": "sw.optim.AdamW({}, lr=0.01)",
    "sw.SGD": "sw.optim.SGD({}, lr=0.1, momentum=0.9)",
    "Averaging": "Averaging({}, lr=0.1, momentum=0.5)",
}
#: an optimizer with modes, as schedule-free's: eval() moves parameters to an average, train() back
AVERAGING = """\
class Averaging(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        value = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p].setdefault("z", torch.zeros_like(p)).lerp_(p.detach(), 0.25)
        return value
    @torch.no_grad()
    def move(self, weight):
        for p in (p for group in self.param_groups for p in group["params"] if "z" in self.state[p]):
            p.lerp_(self.state[p]["z"], weight)
    def eval(self):
        self.move(0.5)
    def train(self):
        self.move(-1.0)
"""
OPTIONS = ("", "bucket_cap_mb=0.001", 'transport="staged"')

HEADER = """\
import contextlib, copy, io, os, select, shutil
import torch
from torch import nn

def x(k):
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * k + rank))

torch.manual_seed(0)
"""
#: two steps more: whatever statements have left behind takes effect, and ranks that are out of step hear of it
FOOTER = """\
for k in (98, 99):
    model.zero_grad()
    loss(model, k).backward()
    optimizer.step()
with sw.full_parameters(model):
    final = {name: p.detach().clone() for name, p in sw.unwrap(model).named_parameters()}
final.update({name: b.clone() for name, b in sw.unwrap(model).named_buffers()})
"""


@dataclasses.dataclass(frozen=True)
class Draw:
    """A statement as it is drawn."""

    kind: str
    a: int = 0
    b: int = 0


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement as it stands in a program.

    Attributes
    ----------
    refusals : tuple of str
        Patterns of the sentences with which the engine may end the program here or later.
    """

    text: str
    refusals: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A whole program.

    Attributes
    ----------
    is_exact : bool
        Whether the engine owes the oracle's bits; else its values to rounding.
    """

    world_size: int
    stage: str
    setup: str
    statements: tuple[Statement, ...]
    is_exact: bool = True

    @property
    def pieces(self) -> list[str]:
        """What is run one after the other."""
        return [HEADER + self.setup, *(each.text for each in self.statements), FOOTER]

    def refusals_until(self, piece: int) -> list[str]:
        """Patterns of sentences that may end it at that piece."""
        return [pattern for each in self.statements[:piece] for pattern in each.refusals]

    def as_file(self) -> str:
        """A file that runs alone, under torchrun or on one process a rank of its own making."""
        return "\n".join(
            [
                f"# world_size={self.world_size} exact={self.is_exact}",
                f"# python tests/programs THIS_FILE   or   torchrun --nproc-per-node {self.world_size} THIS_FILE",
                "import torch.distributed as dist",
                "import shardwright as sw",
                'dist.is_initialized() or dist.init_process_group("gloo")',
                "rank, world_size, seen, losses, children = dist.get_rank(), dist.get_world_size(), [], [], []",
                *("# ---\n" + piece for piece in self.pieces),
                "# ---",
                'print(f"rank {rank}:", seen, {name: float(value.double().sum()) for name, value in final.items()})',
            ]
        )


def program_of(text: str) -> Program:
    """From what as_file() wrote, perhaps with lines taken out or changed by hand. Nothing is known of refusals then."""
    found = re.match(r"# world_size=(\d+) exact=(\w+)", text)
    if not found:
        raise ValueError("the first line of a program must be '# world_size=W exact=True'")
    pieces = text.split("# ---\n")[1:-1]
    setup = pieces[0].removeprefix(HEADER)
    return Program(int(found[1]), "?", setup, tuple(Statement(piece) for piece in pieces[1:-1]), found[2] == "True")


class State:
    """What a statement must know of those before it.

    Attributes
    ----------
    names : list of str
        Of the optimizers.
    """

    def __init__(self, stage: str, model: str, optimizer: str, form: int) -> None:
        self.stage, self.model, self.optimizer = stage, model, optimizer
        self.open = 0  # losses without a backward
        self.is_local = False  # gradients that no backward has averaged
        self.was_local = False  # the same, also where they were zeroed in place since
        self.is_broken = False  # gradients that a backward has left in its midst
        self.is_ahead = False  # one rank alone has begun a forward, which failed
        self.is_uneven = False  # gradients that some ranks alone have cleared
        self.stands = False  # gradients that a backward has averaged, and nobody has cleared since
        self.has: set[str] = set()  # names that earlier statements have made
        self.count = 0
        self.is_exact = True
        self.form = form  # 0: one optimizer; 1: it lacks some parameters; 2: two
        self.frozen: set[int] = set()

    @property
    def names(self) -> list[str]:
        return ["optimizer", "second"] if self.form == 2 else ["optimizer"]

    @property
    def wrap_options(self) -> str:
        """Of the stage; the program vouches for an optimizer of its own, which is elementwise."""
        flat = ', partition="flat"' if self.optimizer == "Averaging" and self.stage != "0" else ""
        return WRAP_OPTIONS[self.stage] + flat

    def begin_round(self) -> bool:
        """A backward that averages. False where the program would owe no bits that can be compared.

        At zero >= 2 what backwards inside no_sync() add to an accumulated mean is summed by itself and added to the mean then; whole
        gradients are added one by one. That is rounding, which SGD passes on as it is; Adam may make a step of it where gradients cancel.
        """
        if self.is_broken:
            return False
        if self.is_local and self.stands and self.stage in SLICED_GRADIENTS:
            if "SGD" not in self.optimizer or self.model == "low":
                return False
            self.is_exact = False
        self.is_local, self.was_local, self.stands, self.is_ahead = False, False, True, False
        if self.model != "heads" and not self.frozen:  # a round leaves what no rank used as it was
            self.is_uneven = False
        return True

    def may_step(self) -> bool:
        """False where each rank would take its own way, as it would under torch's own wrapper."""
        if self.is_broken and self.stage != "1":
            return False
        return self.stage in SLICED_GRADIENTS or not (self.is_uneven or (self.is_local and self.stage == "0"))

    def close_graphs(self, b: int) -> str:
        """Text before what writes to parameters: as a rule no forward waits for its backward, which would be an error of autograd's."""
        if not self.open or b % 5 == 4:
            return ""
        self.open = 0
        return "losses.clear()\n"

    def clear(self, to_none: bool = True) -> None:
        """All gradients are cleared."""
        self.is_local = self.stands = self.is_uneven = self.is_broken = False
        self.was_local &= not to_none

    def next_number(self) -> int:
        self.count += 1
        return self.count


Renderer = Callable[[State, int, int], "Statement | str | None"]
KINDS: dict[str, Renderer] = {}
WEIGHTS: dict[str, int] = {}


def kind(name: str, weight: int = 2) -> Callable[[Renderer], Renderer]:
    def register(function: Renderer) -> Renderer:
        KINDS[name], WEIGHTS[name] = function, weight
        return function

    return register


def setup_of(state: State, options: str) -> str:
    """Text that makes the module, the optimizer and the wrapper."""
    made = OPTIMIZERS[state.optimizer]
    everything = [option for option in (state.wrap_options, options) if option]
    if 'transport="staged"' in options and state.stage in SHARED:
        everything.pop()
    members = "module.parameters()"
    lines = [MODELS[state.model], AVERAGING if state.optimizer == "Averaging" else ""]
    if state.form:
        lines.append("some, others = [*module.parameters()][::2], [*module.parameters()][1::2]\n")
        members = "some"
    lines.append(f"optimizer = {made.format(members)}\n")
    if state.form == 2:
        lines.append("second = torch.optim.SGD(others, lr=0.05, momentum=0.5)\n")
    lines.append(f"model, optimizer = sw.wrap(module, optimizer, timeout_s=20, {', '.join(everything)})\n")
    if state.form == 2 and state.stage != "0":
        lines.append("second = sw.shard_optimizer(model, second)\n")
    return "".join(lines)


def render(
    draws: Sequence[Draw], world_size: int, stage: str, model: str, optimizer: str, form: int, options: str
) -> Program:
    """The program of some draws."""
    from . import others, statements  # noqa: F401  fill KINDS

    state = State(stage, model, optimizer, form)
    setup = setup_of(state, options)
    made = []
    for draw in draws:
        found = KINDS[draw.kind](state, draw.a, draw.b)
        if found is not None:
            made.append(found if isinstance(found, Statement) else Statement(found))
    return Program(world_size, stage, setup, tuple(made), state.is_exact)
