"""Statements about what other code does around a wrapped module: wrappers, forks, modes of an optimizer, a second module, loading
and saving, queues. As in statements.py.
"""

from __future__ import annotations

from .statements import RELEASED_COPY, RELEASED_USE, WRITTEN_SINCE, after_local, clear_text
from .text import PRIVATE, SLICED, WRAP_OPTIONS, State, Statement, kind

KEPT = r"cannot move"
FORKED_LATE = r"a forked child"
#: a forward that one rank alone has begun is closed before gradients are used
ONE_IS_AHEAD = r"ranks disagree on collective .*optimizer\.eval\(\)"
#: averages inside a child would be collective
FORKED_GATHER = r"fork"

# wrappers -------------------------------------------------------------------------------------------------------------

REFUSED = (
    "torch.nn.parallel.DistributedDataParallel({})",
    "torch.nn.parallel.DistributedDataParallel(nn.Sequential({}))",
    'torch.distributed.fsdp.FullyShardedDataParallel({}, device_id=torch.device("cpu"))',
    'torch.distributed.fsdp.fully_shard({}, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,)))',
    "sw.wrap(model)",
    "sw.wrap(model, optimizer, zero=2)",
)


@kind("wrapper that is refused", 2)
def refused(state: State, a: int, b: int) -> str:
    """Each makes nothing and leaves everything as it was. In the oracle torch's own find no process group."""
    made = REFUSED[a % len(REFUSED)].format(("model", "module")[b % 2])
    return f"""\
try:
    {made}
except (sw.Error, ValueError, RuntimeError) as error:
    seen.append("refused")
else:
    seen.append("made")
"""


@kind("wrapper that calls ours", 2)
def around(state: State, a: int, b: int) -> str | None:
    if not state.begin_round():
        return None
    made = ('torch.compile(model, backend="eager")', "nn.DataParallel(model)", "nn.Sequential(model)")
    if a % 3 == 2 and state.model == "heads":
        return None  # Sequential passes one argument on
    each = "".join(f"{name}.step()\n" for name in state.names)
    return f"""\
{state.close_graphs(0)}around = {made[a % 3]}
value = loss(around, {state.next_number()})
seen.append(value.item())
value.backward()
{each}{clear_text(state)}"""


# forks ----------------------------------------------------------------------------------------------------------------

CHILD = """\
class Child:  # a forked child, which runs read() whenever it is asked
    def __init__(self, read):
        ours, theirs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            while select.select([ours[0]], [], [], 60)[0] and os.read(ours[0], 1) == b"x":
                try:
                    said = repr(read())
                except BaseException as error:
                    said = "!" + str(error)
                os.write(theirs[1], said.encode()[:4000])
            os._exit(0)
        os.close(ours[0]), os.close(theirs[1])
        self.ask, self.answer = ours[1], theirs[0]
        children.append(self)
    def __call__(self, last=False):
        os.write(self.ask, b"x")
        said = os.read(self.answer, 4096).decode() if select.select([self.answer], [], [], 20)[0] else "!no answer"
        if last:
            self.end()
        if said.startswith("!"):
            raise sw.Error(said)
        return float(said)
    def end(self):
        if self.pid:
            os.write(self.ask, b"-"), os.close(self.ask), os.close(self.answer), os.waitpid(self.pid, 0)
            self.pid = 0
"""
#: the same for the oracle, whose ranks are threads: what is forked from a thread keeps locks of the others
CHILD_OF_ORACLE = """\
class Child:
    def __init__(self, read):
        kept = [(b, b.clone()) for b in module.buffers()]
        with torch.random.fork_rng():
            self.pid, self.said = 0, read()
        for b, value in kept:
            b.data.copy_(value)
    def __call__(self, last=False):
        return self.said
"""
READS = (
    "loss(module, 77).item()",
    "sum(v.double().sum().item() for v in module.state_dict().values())",
    "sum(v.double().sum().item() for v in sw.full_state_dict(model).values())",
    "sum(p.detach().double().sum().item() for p in copy.deepcopy(module).parameters())",
)


@kind("fork", 2)
def fork(state: State, a: int, b: int) -> Statement | None:
    """A child that reads at once, or later, when it is asked."""
    if "child" in state.has or "parameters of several processes" in state.has:
        return None
    text = "" if "Child" in state.has else CHILD
    state.has |= {"child", "Child"}
    text += f"""\
def read():
    with torch.no_grad():
        return {READS[a % len(READS)]}
with sw.full_parameters(model):
    now = read()
    child = Child(read)
    {"seen.append(child())" if b % 2 else ""}
"""
    if b % 2:
        state.has.add("child has read")
    return Statement(text, (FORKED_GATHER,) if state.stage in PRIVATE else ())


@kind("ask a child", 3)
def ask_a_child(state: State, a: int, b: int) -> Statement | None:
    """It says what it read at the fork, or would have read; else that it is late, and then the parent's own value is taken."""
    if "child" not in state.has:
        return None
    state.has -= {"child", "child has read"}
    return Statement(
        "try:\n    seen.append(child(last=True))\nexcept sw.Error as error:\n    assert 'fork' in str(error), error\n    seen.append(now)\n"
    )


# an optimizer's modes -------------------------------------------------------------------------------------------------


@kind("modes of the optimizer", 3)
def modes(state: State, a: int, b: int) -> Statement | None:
    """A method of the user's optimizer runs as a step does, and asks the same of gradients."""
    if state.optimizer != "Averaging":
        return None
    text = f"""\
{state.close_graphs(0)}optimizer.eval()
with torch.no_grad():
    seen.append(loss(model, {state.next_number()}).item())
{"" if b % 3 == 2 else "optimizer.train()"}
"""
    return Statement(text, (*after_local(state), *((ONE_IS_AHEAD,) if state.is_ahead else ())))


# a second module ------------------------------------------------------------------------------------------------------


@kind("an optimizer over two modules", 2)
def two_modules(state: State, a: int, b: int) -> str:
    """The second without a wrapper, or wrapped too, or both as one."""
    k = state.next_number()
    options = WRAP_OPTIONS[state.stage]
    wrapped = (
        f"first, joint = sw.wrap(first, joint, timeout_s=20, {options})",
        f"first, joint = sw.wrap(first, joint, timeout_s=20, {options})\n    second_module = sw.wrap(second_module, timeout_s=20, {options})",
        f"both, joint = sw.wrap(nn.Sequential(first, second_module), joint, timeout_s=20, {options})\n    first, second_module = both, nn.Identity()",
    )[a % 3]
    return f"""\
torch.manual_seed({k})
first, second_module = nn.Linear(7, 31), nn.Linear(31, 3)
joint = torch.optim.SGD([*first.parameters(), *second_module.parameters()], lr=0.1)
try:
    {wrapped}
    for k in range({k}, {k} + 2):
        value = second_module(first(x(k).float())).square().mean()
        seen.append(value.item())
        value.backward()
        joint.step()
        joint.zero_grad()
except (sw.Error, ValueError):
    seen.append("refused")
"""


FOLDER = 'folder = os.environ.get("SW_TEST_FOLDER") or f"/tmp/programs-{os.getppid()}"\n'

# loading and saving ---------------------------------------------------------------------------------------------------


@kind("load in the middle", 3)
def load_in_the_middle(state: State, a: int, b: int) -> Statement | None:
    """By load_state_dict() of the wrapper, the module or a module inside it, at every stage."""
    if "saved" not in state.has:
        return None
    text = (
        'model.load_state_dict({f"module.{name}": value for name, value in saved.items()})\n',
        "module.load_state_dict(saved)\n",
        "name, inner = next((n, m) for n, m in module.named_children() if [*m.parameters()])\n"
        'inner.load_state_dict({n.removeprefix(name + "."): v for n, v in saved.items() if n.startswith(name + ".")})\n',
    )[a % 3]
    return Statement(state.close_graphs(b) + text, (WRITTEN_SINCE,) if state.open else ())


@kind("two modules in one checkpoint", 2)
def checkpoint_of_two(state: State, a: int, b: int) -> str | None:
    if state.form == 2 or "pair" in state.has:
        return None
    state.has |= {"pair", f"checkpoint {state.form}"}
    options = WRAP_OPTIONS[("0", state.stage)[a % 2]]
    return f"""\
torch.manual_seed(1)
pair = nn.Linear(7, 29)
pair, pair_optimizer = sw.wrap(pair, torch.optim.AdamW(pair.parameters(), lr=0.1), timeout_s=20, {options})
pair(x({state.next_number()}).float()).square().mean().backward()
pair_optimizer.step()
pair_optimizer.zero_grad()
{FOLDER}sw.save(f"{{folder}}/two", [model, pair], [optimizer, pair_optimizer], overwrite=True)
"""


@kind("load two modules", 2)
def load_two(state: State, a: int, b: int) -> Statement | None:
    if "pair" not in state.has or f"checkpoint {state.form}" not in state.has:
        return None
    k = state.next_number()
    return Statement(f"""\
{state.close_graphs(0)}for k in ({k}, {k}):
    value = pair(x(k).float()).square().mean()
    seen.append(value.item())
    value.backward()
    pair_optimizer.step()
    pair_optimizer.zero_grad()
    if k == {k}:
        sw.load(f"{{folder}}/two", [model, pair], [optimizer, pair_optimizer])
""")


@kind("saves by time", 1)
def saves_by_time(state: State, a: int, b: int) -> str | None:
    """Each call but the first is due, or none; what was saved is restored."""
    if state.form == 2 or state.is_broken:
        return None
    clear = clear_text(state)
    state.begin_round()
    k = state.next_number()
    restore = "seen.append(checkpoints.restore())" if a % 2 else "pass"
    every_s = ("1e9", "1e-9")[a % 2]
    state.clear()
    return f"""\
{state.close_graphs(0)}{FOLDER}rank == 0 and shutil.rmtree(f"{{folder}}/by-time", ignore_errors=True)
optimizer.zero_grad()
loss(model, {k}).backward()
with sw.Checkpointer(f"{{folder}}/by-time", model, optimizer) as checkpoints:
    for step in range(3):
        optimizer.step()
        seen.append(checkpoints.save(step, every_s={every_s}))
        optimizer.zero_grad()
        loss(model, {k} + step).backward()
    {restore}
{clear}"""


@kind("queue", 2)
def queue(state: State, a: int, b: int) -> Statement | None:
    """Parameters go through a queue of torch.multiprocessing, or are moved to memory of several processes.

    A child that was forked before keeps its own; one that is forked afterwards would see each step.
    """
    if "child" in state.has and state.stage == 0:
        return None
    state.has.add("parameters of several processes")  # at zero=0, as without an engine
    if a % 3 == 2:
        refusals = (KEPT, RELEASED_COPY, RELEASED_USE) if state.stage in SLICED else ()
        return Statement("module.share_memory()\n", refusals)
    text = """\
queue = torch.multiprocessing.get_context("fork").SimpleQueue()
with sw.full_parameters(model):
    queue.put({})
    got = queue.get()
    seen.append(sum(v.double().sum().item() for v in got.values()))
""".format(("module.state_dict()", "dict(module.named_parameters())")[a % 2])
    return Statement(text)
