"""The statements of random programs. Each renders its text from two small numbers, and says which refusals it may meet.

A refusal is a promise: docs/promises.md has a line for each pattern here. Where no pattern matches, an error of the engine is a
failure, as unequal weights are.
"""

from __future__ import annotations

from .text import (
    OPTIMIZERS,
    PRIVATE,
    SHARED,
    SLICED,
    SLICED_GRADIENTS,
    STAGES,
    State,
    Statement,
    kind,
)

BY_HAND = r"has a gradient that no backward of the module brought"
NOT_AVERAGED = r"not averaged yet"
SLICE_ALONE = r"of which this rank keeps a slice"
SHARED_WRITE = r"was written to, and the host's ranks share it|was written to outside of the step"
RELEASED_USE = r"is released, so that this rank keeps a slice of it|was written to while it was"
RELEASED_COPY = r"this module.s parameters are released|is released, so that this rank keeps a slice of it"
REPLACED_DATA = r"the data of parameter .* was replaced|was written to while it was released"
SCALED_APART = r"ranks disagree about (the gradients of a step: factors that|what the averaged gradients)"
CLEARED_APART = r"ranks disagree about the gradients of a step: parameters (without a|whose) gradient"
#: the engine counts writes through .data where it sees them
WRITTEN_SINCE = r"modified by an inplace operation"
GRADIENT_FREE = r"does not require grad"


def step_text(state: State, which: int = 0) -> str:
    return "".join(f"{name}.step()\n" for name in state.names[: 1 + (which % 2 or state.form != 2)])


def clear_text(state: State, arguments: str = "") -> str:
    state.clear("False" not in arguments)
    if state.form == 1:
        return f"model.zero_grad({arguments})\n"
    return "".join(f"{name}.zero_grad({arguments})\n" for name in state.names)


def after_local(state: State) -> tuple[str, ...]:
    return (NOT_AVERAGED,) if state.was_local and state.stage in SLICED else ()


# steps ----------------------------------------------------------------------------------------------------------------


@kind("train", 8)
def train(state: State, a: int, b: int) -> str | None:
    if not state.begin_round():
        return None
    before = state.close_graphs(b)
    k = state.next_number()
    each = "".join(f"{name}.step()\n" for name in state.names)
    return f"{before}losses.append(loss(model, {k}))\nseen.append(losses[-1].item())\nlosses.pop().backward()\n{each}{clear_text(state)}"


@kind("forward", 4)
def forward(state: State, a: int, b: int) -> str:
    state.open += 1
    return f"losses.append(loss(model, {state.next_number()}))\nseen.append(losses[-1].item())\n"


@kind("backward", 6)
def backward(state: State, a: int, b: int) -> str | None:
    """Of all losses together, or of the first or the last alone; where there is none, of a new one."""
    if not state.begin_round():
        return None
    if not state.open:
        return f"loss(model, {state.next_number()}).backward()\n"
    if a % 3 == 0:
        state.open = 0
        return "sum(losses).backward()\nlosses.clear()\n"
    state.open -= 1
    return f"losses.pop({0 if a % 3 == 1 else ''}).backward()\n"


@kind("discard", 1)
def discard(state: State, a: int, b: int) -> str | None:
    """Forwards that no backward follows."""
    state.open, was = 0, state.open
    return "losses.clear()\n" if was else None


@kind("step", 5)
def step(state: State, a: int, b: int) -> Statement | None:
    if not state.may_step():
        return None
    return Statement(state.close_graphs(b) + step_text(state, a), after_local(state))


@kind("closure", 1)
def closure(state: State, a: int, b: int) -> str | None:
    if state.form == 2 or OPTIMIZERS[state.optimizer].startswith("sw."):
        return None
    state.clear()
    state.begin_round()
    before = state.close_graphs(b)
    k = state.next_number()
    return f"""\
{before}def closure():
    optimizer.zero_grad()
    value = loss(model, {k})
    value.backward()
    return value
seen.append(optimizer.step(closure).item())
"""


@kind("zero_grad", 4)
def zero_grad(state: State, a: int, b: int) -> str:
    return clear_text(state, ("", "set_to_none=False", "set_to_none=True")[a % 3])


@kind("module.zero_grad", 1)
def module_zero_grad(state: State, a: int, b: int) -> str:
    state.clear(a % 2 == 0)
    return f"model.zero_grad(set_to_none={a % 2 == 0})\n"


@kind("zero_grad on one rank", 1)
def zero_grad_on_one_rank(state: State, a: int, b: int) -> Statement:
    state.is_uneven |= state.stands or state.was_local
    text = f"if rank == {a % 2}:\n    optimizer.zero_grad(set_to_none={b % 2 == 0})\n"
    return Statement(text, (CLEARED_APART,) if state.stage in SLICED else ())


@kind("no_sync on one rank", 1)
def no_sync_on_one_rank(state: State, a: int, b: int) -> Statement | None:
    if state.model == "norm":
        return None  # whose buffers all ranks exchange at each forward
    if state.is_broken:
        return None
    state.is_local = state.was_local = True
    text = f"if rank == 1:\n    with model.no_sync():\n        loss(model, {state.next_number()}).backward()\n"
    return Statement(text)


@kind("no_sync", 3)
def no_sync(state: State, a: int, b: int) -> str | None:
    if state.is_broken:
        return None
    state.is_local = state.was_local = True
    return f"with model.no_sync():\n    loss(model, {state.next_number()}).backward()\n"


@kind("eval", 2)
def evaluate(state: State, a: int, b: int) -> str:
    inside = f"    seen.append(loss(model, {state.next_number()}).item())\n"
    if a % 2:
        return f"with torch.no_grad():\n{inside}"
    return f"model.eval()\nwith torch.no_grad():\n{inside}model.train()\n"


@kind("learning rate", 1)
def learning_rate(state: State, a: int, b: int) -> str:
    return 'optimizer.param_groups[0]["lr"] *= 0.5\n'


@kind("learning rate on one rank", 1)
def learning_rate_on_one_rank(state: State, a: int, b: int) -> Statement | None:
    told = r"ranks disagree about the optimizer: .*(lr=|different hyperparameters before the last step)"  # of two optimizers
    return Statement('optimizer.param_groups[0]["lr"] *= 0.5 + rank\n', (told,))


# gradients ------------------------------------------------------------------------------------------------------------


@kind("clip", 2)
def clip(state: State, a: int, b: int) -> Statement | None:
    if not state.may_step():
        return None
    if a % 4:
        return Statement("seen.append(sw.clip_grad_norm_(model, 0.02).item())\n", after_local(state))
    if state.model == "low":
        return None
    state.is_exact = False  # torch's own sum of squares rounds in another order
    return Statement("nn.utils.clip_grad_norm_(module.parameters(), 0.02)\n", after_local(state))


EDITS = {
    "p.grad.mul_(0.5)": (),
    "p.grad.zero_()": (),
    "p.grad = None": (),
    "p.grad.clamp_(-1e-3, 1e-3)": (SLICE_ALONE,),
    "p.grad.add_(0.01)": (SLICE_ALONE,),
    "p.grad = p.grad * 0.5": (SLICE_ALONE,),
    "p.grad.data.mul_(0.5)": (),
}


@kind("edit gradients", 3)
def edit_gradients(state: State, a: int, b: int) -> Statement:
    """Between a backward and a step."""
    text, refused = [*EDITS.items()][a % len(EDITS)]
    which = ("module.parameters()", "[*module.parameters()][:1]", "[*module.parameters()][1::2]")[b % 3]
    body = f"for p in {which}:\n    if p.grad is not None:\n        {text}\n"
    return Statement(body, refused if state.stage in SLICED_GRADIENTS else ())


@kind("edit gradients on one rank", 1)
def edit_gradients_on_one_rank(state: State, a: int, b: int) -> Statement | None:
    if state.stage in ("0", "1"):
        return None  # whole gradients are each rank's own, as under torch's own wrapper
    body = "for p in module.parameters():\n    if rank == 1 and p.grad is not None:\n        p.grad.mul_(3.0)\n"
    return Statement(body, (SCALED_APART,))


@kind("full_gradients", 1)
def full_gradients(state: State, a: int, b: int) -> Statement | None:
    if state.is_local:
        return None
    text = "seen.append([None if g is None else g.double().sum().item() for g in sw.full_gradients(model).values()])\n"
    return Statement(text)


@kind("gradients by hand", 1)
def gradients_by_hand(state: State, a: int, b: int) -> Statement | None:
    """What torch.autograd.grad gives, set as `.grad`."""
    body = f"""\
members = [p for p in module.parameters() if p.requires_grad]
found = torch.autograd.grad(loss(model, {state.next_number()}), members, allow_unused=True)
for p, g in zip(members, found):
    p.grad = g
"""
    refusals = (NOT_AVERAGED, BY_HAND) if state.stage in SLICED else ()
    if state.stage == "0":
        return None  # each rank's own, as under torch's own wrapper
    return Statement(body, refusals)


@kind("input gradients", 1)
def input_gradients(state: State, a: int, b: int) -> Statement:
    """A forward without a backward of parameters. A later step on gradients that were stepped on before is refused."""
    k = state.next_number()
    more = ", True" if state.model == "heads" else ""
    text = f"""\
inputs = x({k}).requires_grad_()
seen.append(torch.autograd.grad(model(inputs{more}).sum(), inputs)[0].sum().item())
"""
    return Statement(text, (BY_HAND,) if state.stands else ())


@kind("retain_graph", 1)
def retain_graph(state: State, a: int, b: int) -> str | None:
    if not state.begin_round():
        return None
    return f"value = loss(model, {state.next_number()})\nvalue.backward(retain_graph=True)\nvalue.backward()\n"


@kind("penalty", 1)
def penalty(state: State, a: int, b: int) -> str | None:
    """A backward through a backward."""
    if state.model == "norm" or not state.begin_round():
        return None
    more = ", True" if state.model == "heads" else ""
    return f"""\
inputs = x({state.next_number()}).requires_grad_()
output = model(inputs{more})
slope, = torch.autograd.grad(output.sum(), inputs, create_graph=True)
(output.square().mean() + slope.square().mean()).backward()
"""


# hooks, exceptions ----------------------------------------------------------------------------------------------------


@kind("tensor hook", 1)
def tensor_hook(state: State, a: int, b: int) -> str:
    """A hook that changes a gradient before it is added."""
    return f"""\
trained = [p for p in module.parameters() if p.requires_grad]
trained[{a} % len(trained)].register_hook(lambda g: g * 0.5)
"""


@kind("accumulation hook", 1)
def accumulation_hook(state: State, a: int, b: int) -> Statement:
    """A hook that changes a gradient after it was added, registered after wrapping."""
    text = f"""\
def halve(p):
    p.grad.mul_(0.5)
trained = [p for p in module.parameters() if p.requires_grad]
trained[{a} % len(trained)].register_post_accumulate_grad_hook(halve)
"""
    return Statement(text, (SCALED_APART,) if state.stage in SLICED_GRADIENTS else ())


@kind("module hooks", 1)
def module_hooks(state: State, a: int, b: int) -> str:
    leaf = "[m for m in module.modules() if isinstance(m, nn.Linear)][0]"
    if a % 2:
        return f"{leaf}.register_full_backward_hook(lambda m, inner, outer: None)\n"
    return f"{leaf}.register_forward_hook(lambda m, args, output: output * 0.5)\n"


@kind("forward raises", 2)
def forward_raises(state: State, a: int, b: int) -> str:
    """In its midst, on every rank or on one."""
    k = state.next_number()
    one = a % 3 == 0 and state.model != "norm"  # whose buffers all ranks exchange at each forward
    state.is_ahead = state.is_ahead or one
    return f"""\
def fail(*_):
    raise ValueError("on purpose")
handle = [m for m in module.modules() if isinstance(m, nn.Linear)][1].register_forward_pre_hook(fail)
with contextlib.suppress(ValueError):
    {"rank == 1 and " if one else ""}loss(model, {k})
handle.remove()
"""


@kind("backward raises", 1)
def backward_raises(state: State, a: int, b: int) -> str | None:
    """On every rank. What it leaves in gradients is cleared, or else never averaged."""
    if not state.begin_round():
        return None
    if b % 2:
        state.is_local = state.was_local = state.is_broken = True
    else:
        state.clear()
    return f"""\
def fail(gradient):
    raise ValueError("on purpose")
handle = [p for p in module.parameters() if p.requires_grad][{a % 2}].register_hook(fail)
with contextlib.suppress(ValueError):
    loss(model, {state.next_number()}).backward()
handle.remove()
{"" if b % 2 else "model.zero_grad()"}
"""


# parameters ---------------------------------------------------------------------------------------------------------


WRITES = (
    "with torch.no_grad():\n    for p in {}:\n        p.mul_(0.5)\n",
    "for p in {}:\n    p.data.mul_(0.5)\n",
    "for p in {}:\n    p.data = p.data * 0.5\n",
    "for p in {}:\n    p.data.copy_(torch.ones_like(p) * 0.25)\n",
    "with torch.no_grad():\n    for p in {}:\n        p.clamp_(-0.1, 0.1)\n",
)


@kind("write", 3)
def write(state: State, a: int, b: int) -> Statement:
    text = WRITES[a % len(WRITES)]
    members = ("module.parameters()", "[*module.parameters()][:1]")[b % 2]
    refusals: tuple[str, ...] = ()
    if state.stage in PRIVATE:
        refusals = (RELEASED_USE, REPLACED_DATA)
    elif state.stage in SHARED:
        refusals = (SHARED_WRITE, REPLACED_DATA)
    elif state.stage in SLICED and "p.data =" in text:
        refusals = (REPLACED_DATA,)
    return Statement(state.close_graphs(b) + text.format(members), refusals)


@kind("write inside", 3)
def write_inside(state: State, a: int, b: int) -> Statement:
    before = state.close_graphs(b)
    body = ("p.mul_(0.5)", "p.data.mul_(0.5)", "p.copy_(torch.ones_like(p) * 0.25)", "p.add_(0.01 * rank)")[a % 4]
    text = f"""\
{before}with sw.full_parameters(model, writable=True), torch.no_grad():
    for p in module.parameters():
        {body}
"""
    return Statement(text, (WRITTEN_SINCE,) if state.open else ())


@kind("freeze", 2)
def freeze(state: State, a: int, b: int) -> str:
    state.frozen.add(a)
    return f"[*module.parameters()][1 + {a} % 3].requires_grad_({b % 2 == 1})\n"


@kind("add_param_group", 1)
def add_param_group(state: State, a: int, b: int) -> str | None:
    if state.form != 1:
        return None
    state.form = 0
    return 'optimizer.add_param_group({"params": others, "lr": 0.03})\n'


@kind("functional_call", 2)
def functional_call(state: State, a: int, b: int) -> Statement | None:
    k = state.next_number()
    inside, values = ("module", "module.named_parameters()")
    call = f"torch.func.functional_call({inside}, values, (x({k}),))"
    if a % 3 == 0:  # gradients reach the parameters, past the wrapper's forward
        if not state.begin_round():
            return None
        text = f"values = {{name: p * 0.5 for name, p in {values}}}\n{call}.square().mean().backward()\n"
        return Statement(text, (r"full_parameters",) if state.stage in PRIVATE else ())
    if a % 3 == 1:  # with values that are no parameters
        text = f"values = sw.full_state_dict(model)\nwith torch.no_grad():\n    seen.append({call}.sum().item())\n"
        return Statement(text)
    text = f"""\
with sw.full_parameters(model):
    values = {{name: p.detach() * 0.5 for name, p in {values}}}
    seen.append({call}.sum().item())
"""
    return Statement(text)


# copies and states ----------------------------------------------------------------------------------------------------


@kind("save", 2)
def save(state: State, a: int, b: int) -> str:
    state.has.add("saved")
    return "saved = sw.full_state_dict(model)\n"


@kind("load", 2)
def load(state: State, a: int, b: int) -> Statement | None:
    if "saved" not in state.has:
        return None
    before = state.close_graphs(b)
    return Statement(f"{before}sw.load_full_state_dict(model, saved)\n", (WRITTEN_SINCE,) if state.open else ())


@kind("save by torch", 1)
def save_by_torch(state: State, a: int, b: int) -> Statement:
    state.has.add("theirs")
    text = (
        "theirs = copy.deepcopy(model.state_dict())\n",
        "file = io.BytesIO()\ntorch.save(model.state_dict(), file)\nfile.seek(0)\ntheirs = torch.load(file)\n",
    )[a % 2]
    return Statement(text, (RELEASED_COPY,) if state.stage in PRIVATE else ())


@kind("load by torch", 1)
def load_by_torch(state: State, a: int, b: int) -> Statement | None:
    if "theirs" not in state.has:
        return None
    refusals = {"3": (SHARED_WRITE,), "private": (RELEASED_USE, RELEASED_COPY)}.get(state.stage, ())
    return Statement(state.close_graphs(b) + "model.load_state_dict(theirs)\n", refusals)


@kind("save optimizer", 1)
def save_optimizer(state: State, a: int, b: int) -> str:
    state.has.add(f"state of {len(state.names)} {state.form}")
    return "".join(f"{n}_state = sw.full_optimizer_state_dict(model, {n})\n" for n in state.names)


@kind("load optimizer", 1)
def load_optimizer(state: State, a: int, b: int) -> str | None:
    if f"state of {len(state.names)} {state.form}" not in state.has:
        return None
    return "".join(f"sw.load_full_optimizer_state_dict(model, {n}, copy.deepcopy({n}_state))\n" for n in state.names)


@kind("state_dict of the optimizer", 1)
def optimizer_state_dict(state: State, a: int, b: int) -> Statement:
    text = "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))\n"
    return Statement(text, (r"full_optimizer_state_dict",) if state.stage in SLICED else ())


@kind("copy the wrapper", 1)
def copy_the_wrapper(state: State, a: int, b: int) -> Statement:
    state.has.add("twin")
    text = f"twin = copy.deepcopy(model)\nwith torch.no_grad():\n    seen.append(loss(twin, {state.next_number()}).item())\n"
    return Statement(text, (RELEASED_COPY,) if state.stage in PRIVATE else ())


@kind("train the copy", 1)
def train_the_copy(state: State, a: int, b: int) -> Statement | None:
    if "twin" not in state.has:
        return None
    text = f"""\
twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
loss(twin, {state.next_number()}).backward()
twin_optimizer.step()
with torch.no_grad():
    seen.append(loss(twin, {state.next_number()}).item())
"""
    return Statement(text, (r"steps on whole parameters of",) if state.stage in SLICED else ())


@kind("copy the module", 1)
def copy_the_module(state: State, a: int, b: int) -> Statement:
    k = state.next_number()
    text = f"""\
with sw.full_parameters(model):
    plain = copy.deepcopy(sw.unwrap(model))
plain.zero_grad()
plain(x({k})).square().mean().backward()
seen.append([p.grad is not None and p.grad.double().sum().item() for p in plain.parameters()])
"""
    return Statement(text)


EMA = {
    "begin": """\
with sw.full_parameters(model):
    ema = {name: p.detach().clone() for name, p in module.named_parameters()}
""",
    "update": """\
with sw.full_parameters(model):
    for name, p in module.named_parameters():
        ema[name].lerp_(p.detach(), 0.1)
""",
    "swap": """\
with sw.full_parameters(model, writable=True), torch.no_grad():
    for name, p in module.named_parameters():
        kept = p.detach().clone()
        p.copy_(ema[name])
        ema[name] = kept
""",
}


@kind("EMA", 3)
def ema(state: State, a: int, b: int) -> str:
    if "ema" not in state.has:
        state.has.add("ema")
        return EMA["begin"]
    return EMA["update"] if a % 2 else state.close_graphs(0) + EMA["swap"]


@kind("EMA through .data", 1)
def ema_through_data(state: State, a: int, b: int) -> Statement:
    """As torch_ema does: reads and writes outside of everything."""
    text = f"""\
shadow = [p.data.clone() for p in module.parameters()]
for p in module.parameters():
    p.data.mul_(0.5)
with torch.no_grad():
    seen.append(loss(model, {state.next_number()}).item())
for p, kept in zip(module.parameters(), shadow):
    p.data.copy_(kept)
"""
    refusals: tuple[str, ...] = ()
    if state.stage in ("3", "private"):
        refusals = (SHARED_WRITE, RELEASED_USE, r"full_parameters")
    return Statement(text, refusals)


@kind("AveragedModel", 1)
def averaged_model(state: State, a: int, b: int) -> Statement:
    made = "averaged" in state.has
    state.has.add("averaged")
    text = "" if made else "averaged = torch.optim.swa_utils.AveragedModel(module)\n"
    text += f"averaged.update_parameters(module)\nwith torch.no_grad():\n    seen.append(averaged(x({state.next_number()})).sum().item())\n"
    refusals = (RELEASED_COPY, r"full_parameters") if state.stage in PRIVATE else ()
    return Statement(text, refusals)


# wrapping again -------------------------------------------------------------------------------------------------------


@kind("wrap again", 3)
def wrap_again(state: State, a: int, b: int) -> str | None:
    """At another stage, or the same; with the optimizer's state, or without."""
    if state.form == 2:
        return None
    state.stage = STAGES[a % len(STAGES)]
    state.form, state.open = 0, 0
    state.clear()
    state.has.discard("twin")
    made = OPTIMIZERS[state.optimizer].format("module.parameters()")
    carries = b % 2 and not any(name.startswith("state of") for name in ())
    before = "state = sw.full_optimizer_state_dict(model, optimizer)\n" if carries else ""
    after = "sw.load_full_optimizer_state_dict(model, optimizer, state)\n" if carries else ""
    if carries:  # groups of another form do not fit
        before = "groups = len(optimizer.param_groups)\n" + before
        after = (
            f"if groups == 1 and len(state['param_groups'][0]['params']) == len([*module.parameters()]):\n    {after}"
        )
    return (
        f"losses.clear()\nmodel.zero_grad()\n{before}optimizer = {made}\n"
        f"model, optimizer = sw.wrap(module, optimizer, timeout_s=20, {state.wrap_options})\n{after}"
    )
