"""Every hook into autograd, the optimizers and the compiler.

Each private name has a fallback, so a torch without it lacks a feature but runs:

- `torch._C._current_graph_task_id`: else one number for every backward, and reentrant checkpointing is not told apart.
- `torch._C.DisableTorchFunctionSubclass`: else a read of a released parameter is NaN, and no error.
- `torch.autograd.profiler._is_profiler_enabled`: else a profile has no ranges of ours.
- `torch._C._profiler._RecordFunctionFast`: else ranges have no values of their own, but one text.
- `torch._C._cuda_getCurrentRawStream`: else a slower public function.
- `Node._set_sequence_nr`: else gradients of parameters that are cast arrive when the rest of a backward is over.
- `torch._disable_dynamo`: else `torch.compiler.disable`.
- `Tensor._post_accumulate_grad_hooks`: else a hook that changes gradients must be registered before wrapping.
- `Tensor._use_count`: else joining a group does not wait for torch's threads.
- `Module._compiled_call_impl`: else a module that is compiled in place has breaks in its graph.
- `torch.autograd._engine_run_backward`: else an error of a full memory in a backward has no plan.
- The compiler's tracer: else fullgraph=True ends in its own error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._engine import Error, account_stepped
from .optimizers import check_steppable

_FULL_GRAPH = (
    "fullgraph=True is impossible here: a wrapped module synchronises, and at zero=3 gathers parameters, outside of the graph; leave "
    "fullgraph out, or compile what runs inside: block.forward = torch.compile(block.forward, fullgraph=True)"
)


def _no_graph_task() -> int:
    node = getattr(torch._C, "_current_autograd_node", None)
    return 0 if node is not None and node() is not None else -1


def gradient_hooks(parameter: torch.Tensor) -> dict[int, Any] | None:
    """Return the table of post-accumulate-grad hooks of `parameter`, in the order in which torch runs them."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return hooks if isinstance(hooks, dict) else None


def passed_through_hooks(gradient: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return a gradient as the hooks of register_hook() on `parameter` leave it."""
    for hook in list((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


#: the id of the graph task that runs now; -1 outside of a backward
graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _no_graph_task)


#: returns True while one of torch's profilers records in some thread; runs no Python code
profiler_enabled: Callable[[], bool] = functools.partial(
    getattr, torch.autograd.profiler, "_is_profiler_enabled", False
)


def _fast_range() -> Any:
    """Return torch's class of ranges that have values, or None."""
    made: Any = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)
    try:
        made("shardwright", (), {"label": ""})
    except TypeError:
        return None
    return made


_RecordFunctionFast = _fast_range()


def named_range(op: str, label: str, more: Mapping[str, Any] | None = None) -> Any:
    """Return the profiler range "shardwright:<op>" with its values. Call it only if profiler_enabled(): it takes time."""
    values = {"label": label, **(more or {})}
    if _RecordFunctionFast is None:
        return torch.profiler.record_function(
            f"shardwright:{op}", " ".join(f"{name}={value}" for name, value in values.items())
        )
    return _RecordFunctionFast(f"shardwright:{op}", (), values)


def collective_range(op: str, label: str, parts: Iterable[tuple[int, Any]]) -> Any:
    """Return the profiler range of one collective over `parts` (elements, dtype or its name). See named_range."""
    sized = [(numel, str(dtype).removeprefix("torch.")) for numel, dtype in parts]
    size_bytes = sum(numel * getattr(torch, name).itemsize for numel, name in sized)
    dtypes = ",".join({name: None for _, name in sized})
    return named_range(
        op, label, {"op": op, "numel": sum(numel for numel, _ in sized), "bytes": size_bytes, "dtype": dtypes}
    )


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if a module is compiled, in place or by a module around it."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def inside_functional_call() -> bool:
    """Return True inside torch.func.functional_call, which replaces parameters by other tensors for one call."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_functional_call" and frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
        frame = frame.f_back
    return False


class queue_at_end:  # noqa: N801
    """Run `callback` when the graph task that runs now has ended, while backward() still waits.

    It runs on the thread that ran the last node (the caller's, or torch's own for a GPU), with the caller's streams
    current. Its exceptions come out of backward(). If the backward fails, `failed` runs instead; its own exceptions are
    dropped. torch drops the callback then, and only its deletion shows that: on the caller's thread before the
    exception comes out, on a GPU's thread perhaps some milliseconds later.
    """

    def __init__(self, callback: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        self._callback, self._failed = callback, failed
        self._called = False
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        self._called = True
        self._callback()

    def __del__(self) -> None:
        if not self._called and self._failed is not None:
            with contextlib.suppress(Exception):  # the next call reports the peers' error
                self._failed()


def explained(function: Callable[..., Any], explain: Callable[[BaseException], None]) -> Callable[..., Any]:
    """Return a function that calls `explain` with each exception of `function`, which it raises."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            explain(error)
            raise

    return call


def explain_backwards(explain: Callable[[BaseException], None]) -> None:
    """Call `explain` with each exception of a backward: of the one function with which torch.autograd enters its engine."""
    run = getattr(torch.autograd, "_engine_run_backward", None)
    if run is not None:
        torch.autograd._engine_run_backward = explained(run, explain)


def _increment_each(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


#: bumps the versions of a list of tensors for the engine's writes, so that a backward through an old value fails
increment_versions: Callable[[list[torch.Tensor]], None] = torch.autograd.graph.increment_version
try:
    increment_versions([])
except (RuntimeError, TypeError, AttributeError):  # older torch takes a single tensor
    increment_versions = _increment_each


def raw_stream(ordinal: int) -> int:
    """Return the address of the stream that torch enqueues on now, in this thread, on GPU `ordinal`."""
    if _raw_stream is not None:
        return int(_raw_stream(ordinal))
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def stream_reader(ordinal: int) -> Callable[[], int]:
    """Return raw_stream(ordinal) as a callable, without a Python frame if torch has such a function."""
    return functools.partial(raw_stream if _raw_stream is None else _raw_stream, ordinal)


#: a context in which subclasses of Tensor are treated as plain tensors: no __torch_function__ is called
unguarded: Callable[[], contextlib.AbstractContextManager[None]] = getattr(
    torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext
)
CAN_BE_UNGUARDED = unguarded is not contextlib.nullcontext
#: read and set `.grad`; inside unguarded() without the property of a guarded parameter
_gradient: Any = torch.Tensor.grad
read_gradient: Callable[[torch.Tensor], torch.Tensor | None] = _gradient.__get__
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = _gradient.__set__

_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def disable_compile(function: Callable[..., Any], *, recursive: bool = True) -> Callable[..., Any]:
    """Return `function`, run uncompiled under torch.compile. recursive=False: its callees may be compiled.

    A program that compiles nothing does not pay for the compiler, whose import takes seconds. Once it is loaded, it also
    ignores calls from outside a compiled region. All such functions share one frame's code, and the compiler
    gives up a frame after a few recompilations; it would then compile the frames below.
    """
    lazy = getattr(torch, "_disable_dynamo", None)
    if lazy is not None:
        disabled: Callable[..., Any] = lazy(function, recursive=recursive)  # the compiler is imported at the first call
    else:
        disabled = torch.compiler.disable(function, recursive=recursive)

    @functools.wraps(function)
    def as_it_is(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            _check_breaks()
            return disabled(*args, **kwargs)
        if "torch._dynamo.eval_frame" in sys.modules and _frame_compiler() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return as_it_is


_is_compiling: Callable[[], bool] = torch.compiler.is_compiling
#: returns what compiles the frames that this thread enters; None outside of compiled functions
_frame_compiler: Callable[[], Any] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "get_eval_frame_callback", lambda: False
)


def _check_breaks() -> None:
    """Raise an Error during compilation if the compiler must not break the graph here."""
    try:
        from torch._dynamo.exc import Unsupported
        from torch._dynamo.symbolic_convert import InstructionTranslator

        whole = InstructionTranslator.current_tx().one_graph
    except Exception:  # this torch lacks the name: its own error follows
        return
    if whole:
        # the compiler passes on only its own exceptions unchanged
        raise type("FullGraphError", (Error, Unsupported), {})(_FULL_GRAPH)


_check_breaks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, sequences, dataclasses and registered pytree nodes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from find_tensors(getattr(value, field.name, None))
    elif value is not None and not isinstance(value, (str, bytes, int, float, complex)):
        yield from _registered_tensors(value)


def run_when_ready(tensor: torch.Tensor) -> torch.Tensor:
    """Let the backward of `tensor` run as soon as its gradient is known, and return it.

    A backward prefers what the forward did last, so casts at the start of a forward would all come at its end, and no
    gradient would travel before.
    """
    set_number = getattr(tensor.grad_fn, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(2**64 - 1)
    return tensor


def search_graph(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Return (the leaves that get a gradient, if the backward may run others inside it, as reentrant checkpointing does)."""
    leaves: list[torch.Tensor] = []
    nests, found = False, set()
    waiting: list[Any] = [each.grad_fn for each in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        waiting += [following for following, _ in node.next_functions]
        kind = type(node)  # a program's own node may have other attributes of any name
        leaves += [node.variable] if kind.__name__ == "AccumulateGrad" else []
        nests |= "Checkpoint" in kind.__name__ or _runs_backwards(kind)
    return leaves, nests


def _runs_backwards(kind: type) -> bool:
    """Return True for a node of a program's own Function whose backward names what a backward inside it needs, as a reversible block's."""
    function = getattr(kind, "_forward_cls", None)
    if function is None or function.__module__.partition(".")[0] in ("torch", __name__.partition(".")[0]):
        return False
    code = getattr(inspect.unwrap(function.backward), "__code__", None)
    names = () if code is None else code.co_names
    return any("backward" in each or each in ("grad", "enable_grad", "set_grad_enabled") for each in names)


def _registered_tensors(value: Any) -> Iterator[torch.Tensor]:
    try:
        from torch.utils._pytree import tree_leaves
    except ImportError:
        return
    leaves = tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return
    for leaf in leaves:
        yield from find_tensors(leaf)


def hook_outputs(output: Any, on_gradient: Callable[[torch.Tensor], None]) -> None:
    """Call `on_gradient` at the first gradients of a backward through `output`; leaves would keep such a hook for ever."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            output.register_hook(on_gradient)
        return
    for tensor in find_tensors(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(on_gradient)


class StepListener(Protocol):
    """A listener before each step of an optimizer with a parameter of `identities`; the lowest `serial` comes first."""

    serial: int
    identities: frozenset[int]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_steps(listener: StepListener) -> None:
    """Call `listener.before_step(optimizer)` before each step of its optimizers, for as long as it lives."""
    _listeners.add(listener)
    _install_step_hook()


def ignore_steps(listener: StepListener) -> None:
    _listeners.discard(listener)


@functools.cache
def _install_step_hook() -> None:
    register_optimizer_step_pre_hook(disable_compile(_before_any_step))
    register_optimizer_step_post_hook(account_stepped)


_serial = operator.attrgetter("serial")


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    listeners = []
    for each in sorted(_listeners, key=_serial):
        for group in optimizer.param_groups:
            if not each.identities.isdisjoint(map(id, group["params"])):
                listeners.append(each)
                break
    if _listeners and not listeners:
        check_steppable(optimizer)
    for listener in listeners:
        listener.before_step(optimizer)
