"""wrap(), its inverse unwrap(), and access to the whole state of a wrapped module."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ._engine import Error
from .comm.agreement import gather_values
from .comm.model_ranks import ModelRanks, together
from .comm.process_group import HostGroup, host_group, resolve_group
from .comm.waits import calling, on_every_rank
from .formats.stored import Stored
from .layout.local_parameters import as_dtensors, whole_tensor
from .layout.memory import has_memory, without_memory
from .layout.param_groups import mark_of
from .optim import moments
from .optim.clip_grad import clip
from .optim.in_backward import BackwardOptimizer, check_class, optimizer_of
from .optim.master_weights import MasterOptimizer, has_own_masters, without_masters
from .optim.offload import make_route, make_store
from .optim.rules import resolve
from .optim.sharded import ShardedOptimizer
from .options.checks import offload_folder, offload_kinds, offload_place
from .options.keywords import WrapOptions
from .options.names import offers_names
from .options.options import Options, describes_options
from .parallel import out_of_memory
from .parallel.agreement.optimizer_agreement import Row, agree, check_members, given_rows, watch_loading
from .parallel.ddp import DistributedDataParallel
from .parallel.ddp_compat import precision_of
from .parallel.engine import Engine, needed_engine
from .parallel.loading import UnmatchedNames
from .parallel.moved_tensors import in_pages
from .parallel.replica import Replica, live_replicas
from .parameters.building import Values
from .parameters.mixed_precision import PrecisionPlan
from .parameters.sharded_parameter import is_extended
from .parameters.whole_reads import Reads, named_whole, shaped
from .plan import check_fits, memory_of
from .torch_compat import cuda
from .torch_compat.dtensor import held_tensor, is_dtensor
from .torch_compat.internals import original_of
from .torch_compat.optimizers import step_hooks, takes_hooks

if TYPE_CHECKING:
    from typing_extensions import Unpack

_logger = logging.getLogger("shardwright")
out_of_memory.memory_of = memory_of


@overload
def wrap(
    module: torch.nn.Module, optimizer: None = None, **options: Unpack[WrapOptions]
) -> DistributedDataParallel: ...
@overload
def wrap(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[WrapOptions]
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]: ...


@offers_names
@describes_options(WrapOptions)
@on_every_rank("sw.wrap()")
def wrap(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    init: Callable[[torch.nn.Module], object] | bool | None = None,
    weights: Any = None,
    mixed_precision: Any = None,
    **options: Any,
) -> Any:
    """Wrap `module` to train together with the other ranks.

    Parameters
    ----------
    module : Module
        A module on the CPU, or on one GPU per rank. It is not changed; its parameters keep their identity.
    optimizer : Optimizer, optional
        An optimizer. At zero=0 it is returned unchanged; at other stages an optimizer that steps on this rank's slices
        replaces it. For bfloat16 or float16 parameters it steps on their float32 masters, `state[p]["master"]`, at
        every stage, including 0.
    **options
        The basic fields of Options.
    init : callable or True, optional
        Build a module of the meta device: give its tensors memory and the values of sw.materialize(module, init=init)
        from rank 0's torch generator. True: by the modules' own code. Parameters keep their identity. At zero=3 with
        share_parameters=False a rank holds two units whole at a time, and otherwise its slices (docs/large-models.md).
    weights : str, path, or iterable of (str, Tensor), optional
        Build a module of the meta device, or take any other, and call load_pretrained(wrapped, weights). Only modules
        with buffers that are not stored are initialised. With load_pretrained's options: a tuple (weights, options), such
        as (folder, {"strict": False}) for a stage of a pipeline, which lacks the other stages' names.

    Other Parameters
    ----------------
    **options
        The expert fields of Options.
    mixed_precision : optional
        torch's policy of param_dtype, reduce_dtype and buffer_dtype, instead of `precision`.

    Returns
    -------
    DistributedDataParallel or (DistributedDataParallel, Optimizer)
        Only the module if no optimizer was given.

    Raises
    ------
    Error
        If the module is already wrapped, or ranks disagree about it. With `init` or `weights`: also for a module that
        cannot be initialised, or is on the meta device in parts; a module of the meta device is left there.
    TypeError
        For an unknown option; the message suggests the nearest known one.
    ValueError
        If a launcher's variable is missing or contradicts another.
    NotImplementedError
        For a stage or feature that does not exist.

    Notes
    -----
    Collective. Without a process group, wrap reads the variables of torchrun, Open MPI or SLURM and makes a Gloo group
    (docs/launch.md). Without those variables it trains with one rank.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> model = torch.nn.Linear(4, 1)
    >>> model, optimizer = sw.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """
    if mixed_precision is not None:
        if options.get("precision") is not None:
            raise ValueError("mixed_precision= and precision= were both given: pass one of them")
        options["precision"] = precision_of(mixed_precision)
    given = Options.from_keywords(options)
    clip_grad_norm, partition = given.clip_grad_norm, given.partition
    if clip_grad_norm is not None and optimizer is None:
        raise ValueError(f"clip_grad_norm={clip_grad_norm!r} needs the optimizer, whose steps begin with it")
    if not isinstance(module, torch.nn.Module):
        swapped = isinstance(module, torch.optim.Optimizer)
        remedy = ": the module comes first, sw.wrap(module, optimizer)" if swapped else ""
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"wrap needs a torch.nn.Module, got {got}{remedy}")
    if unwrap(module) is not module and isinstance(original_of(module), TorchDDP):
        raise Error("this module is wrapped already: use it as it is, or pass sw.unwrap(module) to wrap it again")
    policy = given.precision
    if policy is not None and given.compress is not None and PrecisionPlan(module, policy).compressor() is not None:
        raise ValueError(
            f"reduce_dtype and compress={given.compress} both set the wire format of gradients: pass one of them"
        )
    ignored = {each if isinstance(each, str) else id(each) for each in given.ignored_params}
    held = {id(p) for p in module.parameters()}
    for each in given.ignored_params:
        if not isinstance(each, str) and id(each) not in held:
            sentence = "ignored_params: a parameter of shape %s is not one of %s, so it has no effect"
            _logger.warning(sentence, tuple(each.shape), type(module).__name__)
    members = [p for name, p in module.named_parameters() if id(p) not in ignored and name not in ignored]
    takes_over = given.step_in_backward and optimizer is None
    if takes_over and (optimizer := optimizer_of(members)) is None:
        raise ValueError("step_in_backward=True needs the optimizer, which steps in each backward")
    torch_group = resolve_group(given.process_group, given.device_mesh, trains=True)
    group = host_group(torch_group, given.timeout_s, given.warn_after_s)
    stored = sum(isinstance(each, Stored) for each in (*module.parameters(), *module.buffers()))
    ranks = ModelRanks.beside(members, group, stored)
    values = "a function" if callable(init) else str(init) if init is None or init is True else type(init).__name__
    built = {"option init": values, "option weights": "none" if weights is None else "given"}
    _agree_on_optimizer(group, ranks, module, optimizer, given, partition, clip_grad_norm, built)
    sources = Values(init, weights, optimizer)
    wrapped = DistributedDataParallel(module, mixed_precision=mixed_precision, _options=given, _values=sources)
    try:
        if optimizer is not None:
            optimizer = _make_stepper(wrapped._engine, optimizer, partition)
    except BaseException:
        if wrapped._engine.is_building:
            wrapped._engine.abandon()
        raise
    wrapped._engine.keep()
    if isinstance(optimizer, BackwardOptimizer) and takes_over:
        optimizer.take_over(members)
    if optimizer is None or takes_over:
        return wrapped
    if clip_grad_norm is not None:
        clip_before_steps(optimizer, wrapped, clip_grad_norm)
    return wrapped, optimizer


def clip_before_steps(optimizer: torch.optim.Optimizer, module: DistributedDataParallel, max_norm: float) -> None:
    """Begin each step of an optimizer with sw.clip_grad_norm_(module, max_norm)."""
    optimizer.register_step_pre_hook(_Clip(module, max_norm))


class _Clip:
    """A listener that an optimizer calls before it steps: clips by the global norm."""

    def __init__(self, wrapped: DistributedDataParallel, max_norm: float) -> None:
        self._wrapped, self._max_norm = wrapped, max_norm

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._clip(optimizer)
            return None

        def clipped() -> Any:
            loss = closure()
            self._clip(optimizer)
            return loss

        return (args[0], clipped), {name: value for name, value in kwargs.items() if name != "closure"}

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # GradScaler leaves unscaling to a fused step
        max_norm = self._max_norm * (1.0 if scale is None else float(scale))
        is_last = step_hooks(optimizer)[-1] is self  # a later one reads clipped gradients
        clip(self._wrapped, max_norm, take=getattr(optimizer, "take_clip", None) if is_last else None)


@offers_names
@on_every_rank("sw.shard_optimizer()")
def shard_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, partition: str = "auto"
) -> torch.optim.Optimizer:
    """Return the sliced optimizer for a module wrapped with zero >= 1. Collective.

    Every optimizer steps on the DTensors of fully_shard: there it is returned unchanged, and with the option offload its
    state goes there.

    Raises Error for a module at zero=0, ValueError if the optimizer holds a parameter of another module, or is not
    known to be elementwise (see `partition`).
    """
    mark = mark_of(module)
    if mark is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"shard_optimizer needs a torch.optim.Optimizer, got {_not_an_optimizer(optimizer)}")
        if partition != "auto":
            raise ValueError(
                f"partition={partition!r} is for modules of sw.wrap: after sw.fully_shard an optimizer steps on DTensors"
            )
        check_members(type(module).__name__, _names_of(module), optimizer.param_groups, all_of_them=False)
        if mark.options["offload"] is None:
            return optimizer
    engine = needed_engine("shard_optimizer", module)
    if not engine.options.stage:
        raise Error(
            "shard_optimizer needs a module that was wrapped with zero >= 1, got zero=0: use the optimizer as it is"
        )
    if mark is not None:
        _keep_state(engine, optimizer, optimizer)
        return optimizer
    return _step_for(engine, optimizer, partition)


def _step_for(engine: Engine, optimizer: torch.optim.Optimizer, partition: str) -> torch.optim.Optimizer:
    """Return the optimizer that steps on the module of an engine. Collective."""
    replica = engine.replica
    _agree_on_optimizer(replica.group, replica.model_ranks, engine.module, optimizer, engine.options, partition)
    return _make_stepper(engine, optimizer, partition)


def _make_stepper(engine: Engine, optimizer: torch.optim.Optimizer, partition: str) -> torch.optim.Optimizer:
    """Make the optimizer for an engine. MemoryError on all ranks if the plan does not fit: the module is as it was."""
    replicas, inner = list(engine.replicas), without_masters(optimizer)
    out_of_memory.explain_steps(inner)
    without = engine.precision.without_master() if engine.precision is not None else []
    try:
        made: torch.optim.Optimizer
        if engine.options.stage:
            kind = BackwardOptimizer if engine.options.step_in_backward else ShardedOptimizer
            made = kind(inner, replicas[0], partition, without, replicas[1:])
        else:
            made = inner = _with_masters(inner, without)
    except MemoryError:  # alike on all ranks
        _give_back(engine)
        raise
    for replica in () if engine.options.stage else replicas:
        replica.steppers.add_plain(made)
    _keep_state(engine, made, inner)
    try:
        together(replicas[0].model_ranks, lambda: check_fits(replicas), replicas[0].label)
    except (MemoryError, Error):
        _give_back(engine)
        raise
    return made


def _give_back(engine: Engine) -> None:
    """Leave a module as it was. One that got its memory here is wrap's to abandon: it may fit no rank whole."""
    for each in () if engine.is_building else engine.replicas:
        each.retire(together=True)


def _agree_on_optimizer(
    group: HostGroup,
    model_ranks: ModelRanks | None,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: Options,
    partition: str,
    clip_grad_norm: float | None = None,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Raise the same on all ranks for an optimizer that cannot step on the module, or differs, as `beside` may. Collective."""
    names, label, zero = _names_of(module), type(module).__name__, options.stage

    def rows() -> list[Row]:
        way = "flat"
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"wrap needs a torch.optim.Optimizer or None, got {_not_an_optimizer(optimizer)}")
        if optimizer is not None and zero:
            if options.step_in_backward:
                check_class(without_masters(optimizer))
            way = resolve(without_masters(optimizer), partition, group.world_size)
        if optimizer is not None:
            if clip_grad_norm is not None and not zero and not takes_hooks(optimizer):
                raise ValueError(
                    f"clip_grad_norm={clip_grad_norm!r} needs an optimizer that takes step hooks, and {type(optimizer).__name__} does not "
                    "call torch.optim.Optimizer.__init__(): call sw.clip_grad_norm_ before each step instead"
                )
            check_members(label, names, optimizer.param_groups, all_of_them=bool(zero))
            dtensor = next((name for name, p in module.named_parameters() if is_dtensor(p)), None)
            if dtensor is not None and zero and way == "tensor":
                raise ValueError(
                    f"partition='tensor' steps on whole tensors, and parameter {dtensor!r} is a DTensor, of which ranks hold shards"
                )
        if optimizer is not None or not zero:
            _check_offload(module, options, optimizer)
        found = given_rows(optimizer, names, partition if zero else "", clip_grad_norm)
        found[0][2].update(beside or {})
        return found

    together(model_ranks, lambda: agree(group.comm, rows, f"optimizer of {label}"), label)


def _names_of(module: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _not_an_optimizer(given: Any) -> str:
    """Return what `given` is, and the call that makes an optimizer of it."""
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return f"the class {given.__name__}: make the optimizer first, {given.__name__}(module.parameters())"
    remedy = "make one of these parameters, as in torch.optim.AdamW(module.parameters())"
    remedy = "pass options by name, such as zero=2" if isinstance(given, (int, str, Mapping)) else remedy
    return f"{type(given).__name__}: {remedy}"


def _check_offload(module: torch.nn.Module, options: Options, optimizer: torch.optim.Optimizer | None) -> None:
    offload, zero = options.offload, options.stage
    parameters, kind = offload_kinds(offload)
    is_on_gpu = options.device is not None or any(map(cuda.runtime.holds, module.parameters()))
    if kind != "nvme" and parameters != "nvme" and not (kind == "cpu" and is_on_gpu):
        return
    if not getattr(optimizer, "can_offload", False):
        got = "none" if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        where = " of a module on a GPU" if "nvme" not in (parameters, kind) else ""
        raise ValueError(f"offload={offload!r}{where} needs an optimizer of sw.optim (AdamW, Adam or SGD), got {got}")
    assert optimizer is not None
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    name = next((name for name, p in module.named_parameters() if id(p) in held and is_dtensor(p)), None)
    if name is not None and not zero:
        raise ValueError(
            f"offload={offload!r} at zero=0 keeps the state of whole parameters, and parameter {name!r} is a DTensor, of which ranks hold shards: "
            "wrap with zero=1 or higher, which keeps the state of this rank's slice of each shard"
        )


def _keep_state(engine: Engine, optimizer: Any, inner: Any) -> None:
    """Move the state of `inner`, which steps for `optimizer`, to where offload= says. Collective if it moves."""
    place, replica = offload_place(engine.options.offload, "optimizer"), engine.replica
    folder = offload_folder(place)
    earlier = getattr(inner, "store", None)
    in_file = getattr(earlier, "file", None) is not None  # an earlier wrapper put the state into a file
    is_asked = place is not None or earlier is not None
    moves = is_asked and not replica.backend.capabilities.state_is_there
    if folder is None and not moves and not in_file:
        if earlier is not None:  # the module has left its GPU; its state stays on the host
            inner.store = None
        return

    def make() -> Any:
        # a new route: an earlier wrapper's link may have ended
        route = None if replica.link is None else make_route(replica.group, replica.link, replica.label)
        store = earlier if in_file else None
        if store is None:
            nbytes = _state_bytes(optimizer, inner, in_file=folder is not None)
            store = make_store(replica.group, folder, replica.label, nbytes)
        store.route = route
        memory = replica.parameters() if replica.zero == 3 and route is None and store.file is not None else None
        if memory is not None and memory.is_in_file:
            memory.leave_with(store.file)
        return store

    try:
        store = together(replica.model_ranks, make, replica.label)
    except (OSError, MemoryError, ValueError, Error):
        _give_back(engine)
        raise
    inner.store = store
    replica.stores.add(store)


def _state_bytes(optimizer: Any, inner: Any, *, in_file: bool = False) -> int:
    """Return the bytes of state of `inner` after a step on each parameter that trains; a file has whole pages."""
    nbytes, is_sharded = 0, isinstance(optimizer, ShardedOptimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            piece = optimizer.piece_of(p) if is_sharded else held_tensor(p) if is_dtensor(p) else p
            if piece is not None and p.requires_grad:
                nbytes += sum(in_pages(each) if in_file else each for each in inner.state_nbytes(piece, group))
    return nbytes


def keep_optimizer(wrapped: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps at zero=0, on float32 masters of low-precision parameters. Collective."""
    return _step_for(wrapped._engine, optimizer, "")


def _with_masters(optimizer: torch.optim.Optimizer, without: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer that steps on float32 masters of low-precision parameters, but for those in `without`."""
    watch_loading(optimizer)
    if has_own_masters(optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        return optimizer
    made = MasterOptimizer(optimizer, without)
    members = (p for group in optimizer.param_groups for p in group["params"])
    return made if any(map(made.has_master, members)) else optimizer


@on_every_rank("sw.full_optimizer_state_dict()")
def full_optimizer_state_dict(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of the optimizer's whole state in torch's format, on every rank. Collective at zero >= 1."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.full_state_dict()
    return _copied(optimizer.state_dict(), {})


@on_every_rank("sw.full_gradients()")
def full_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return whole averaged gradients by the bare module's names; None for no gradient. Collective at zero >= 2.

    Cost at zero >= 2: every rank receives the bytes of all gradients.
    """
    engine = needed_engine("full_gradients", module)
    found = {name: each for replica in engine.replicas for name, each in replica.full_gradients().items()}
    return {name: found[name] for name, _ in engine.module.named_parameters() if name in found}


@on_every_rank("sw.average_gradients()")
def average_gradients(module: torch.nn.Module) -> None:
    """Average `.grad` over ranks, for gradients that no backward of the module produces. Collective.

    Each rank contributes the `.grad` of every parameter that has one; afterwards `.grad` is the mean, as after a
    synchronised backward. Use it for gradients of torch.autograd.grad that are set by hand, and for pipelines that add
    to weight.grad without running hooks (zero-bubble schedules): call it once before the step. A gradient that is
    already averaged is averaged again. Raises Error if the module is not wrapped, or a backward runs.
    """
    for replica in needed_engine("average_gradients", module).replicas:
        replica.average_gradients()


@contextlib.contextmanager
def full_parameters(
    module: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor], *, writable: bool = False
) -> Iterator[None]:
    """Return a context in which every rank has whole parameters. Collective.

    Parameters
    ----------
    module : Module, Parameter or iterable of Parameter
        A wrapped module, at any stage; or parameters, of whose modules all parameters are then whole.
    writable : bool
        True to allow writes. Each rank writes to its own copy; afterwards all ranks have rank 0's values.
    """
    with calling("sw.full_parameters()"):
        replicas = _replicas_of(module)
    with whole_replicas(replicas, writable=writable):
        yield


@contextlib.contextmanager
def whole_replicas(replicas: Iterable[Replica], *, writable: bool = False) -> Iterator[None]:
    """Return a context in which every rank has the whole parameters of replicas. See full_parameters. Collective."""
    with contextlib.ExitStack() as stack:
        with calling("sw.full_parameters()"):
            for replica in replicas:
                stack.enter_context(replica.writable_parameters() if writable else replica.access.whole())
        yield
        with calling("sw.full_parameters()"):
            stack.close()


def _replicas_of(module: Any) -> Sequence[Replica]:
    """Return the replicas of a wrapped module, or those that hold the parameters, in order of wrapping."""
    if isinstance(module, torch.nn.Module):
        return needed_engine("full_parameters", module).replicas
    asked = {id(each) for each in ([module] if isinstance(module, torch.Tensor) else module)}
    owners = [(each, {id(p) for p in each.table.module_parameters}) for each in live_replicas()]
    strange = len(asked.difference(*(members for _, members in owners)))
    if strange:
        raise Error(f"full_parameters needs parameters of wrapped modules, got {strange} of no wrapped module")
    return [each for each, members in owners if members & asked]


@on_every_rank("sw.full_state_dict()")
def full_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Return a copy of the bare module's state_dict, on every rank, at any stage. Collective at zero=3.

    Cost: the bytes of all parameters on each rank.
    """
    with full_parameters(module):
        made, memo = unwrap(module).state_dict(), dict[int, Any]()
        for name, value in made.items():
            made[name] = _copied(value, memo)
        # what extensions made whole may be rounded: the values are those of slices
        extended = {
            name: p for name, p in named_whole(unwrap(module), remove_duplicate=False).items() if is_extended(p)
        }
        if extended:
            reads = Reads(needed_engine("full_state_dict", module).replicas)
            whole = zip(extended.items(), reads.gather([*extended.values()]))
            made.update({name: shaped(flat, reads.like(p)) for (name, p), flat in whole if name in made})
    return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value, and gather DTensors, also inside dictionaries, to whole tensors. Collective over their mesh."""
    if type(value) is dict:
        return {key: _copied(each, memo) for key, each in value.items()}
    if is_dtensor(value):
        return whole_tensor(value).clone()
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__") and not has_memory(value):
        names, context = value.__tensor_flatten__()  # a wrapper subclass such as torchao's may not implement clone()
        inner = {name: getattr(value, name).clone() for name in names}
        kind: Any = type(value)
        return kind.__tensor_unflatten__(inner, context, value.shape, value.stride())
    return copy.deepcopy(value, memo)


@on_every_rank("sw.load_full_state_dict()")
def load_full_state_dict(
    module: torch.nn.Module, state: Mapping[str, Any] | None, *, strict: bool = True
) -> UnmatchedNames:
    """Load a result of full_state_dict() or a bare module's state_dict, at any stage and world size. Collective.

    Parameters
    ----------
    module : Module
        A wrapped module, at any stage.
    state : mapping of str to Tensor
        Tensors by the bare module's names. All ranks load rank 0's; other ranks may pass None, except the first ranks
        of `groups`.
    strict : bool
        A name that only one side has is an Error, alike on all ranks, as is another shape. As in torch, matching
        tensors are loaded anyway.

    Returns
    -------
    UnmatchedNames
        Names that `state` lacks, and names that the module lacks.

    Notes
    -----
    Cost: a broadcast of all parameters; at zero=3 also, during the call, memory for them on each rank.
    """
    replicas, bare = needed_engine("load_full_state_dict", module).replicas, unwrap(module)
    group, label = replicas[0].group, f"loaded state of {type(bare).__name__}"
    with full_parameters(module, writable=True):
        loads = any(replica.group.rank == 0 for replica in replicas)
        also = " and on the first rank of each group" if len(replicas) > 1 else ""
        result = _load_state(bare, state, strict, also) if loads else ("", [], [])
        results = gather_values(group.comm, lambda: result, label)
        failure, missing, unexpected = next((each for each in results if each[0]), results[0])
        known = {id(p) for replica in replicas for p in replica.table.module_parameters}
        tensors = {n: v for n, v in bare.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
        others = {n: v for n, v in tensors.items() if id(v) not in known}  # buffers, and ignored parameters
        others = {n: held_tensor(v) if is_dtensor(v) else v for n, v in others.items()}
        stay = {name for name, value in others.items() if not has_memory(value)}
        lost = sorted(stay - set(missing))
        if lost:
            failure = failure or (
                f"{lost[0]!r} is {without_memory(others[lost[0]])}. Rank 0's cannot be sent to the others: load it on each rank"
            )
        sent = [value for name, value in others.items() if name not in stay]
        if sent:
            group.broadcast(sent, 0, label)
    if failure:
        raise Error(f"load_full_state_dict: {failure}")
    return UnmatchedNames(missing, unexpected)


def _load_state(bare: torch.nn.Module, state: Any, strict: bool, also: str) -> tuple[str, list[str], list[str]]:
    """Return (the errors, names that `state` lacks, names that the module lacks)."""
    if not isinstance(state, Mapping):
        return f"state must be a mapping of names to tensors on rank 0{also}, got {type(state).__name__}", [], []
    try:
        found = bare.load_state_dict(as_dtensors(state, bare.state_dict(keep_vars=True)), strict=False)
    except Exception as error:  # any error must be reported: the peers wait for the answer
        return str(error) or type(error).__name__, [], []
    missing, unexpected = list(found.missing_keys), list(found.unexpected_keys)
    lacks = {"the state lacks": missing, "the module lacks": unexpected} if strict else {}
    sentences = [f"{what} {', '.join(map(repr, names))}" for what, names in lacks.items() if names]
    return "; ".join(sentences), missing, unexpected


@on_every_rank("sw.load_full_optimizer_state_dict()")
def load_full_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Load a result of full_optimizer_state_dict(), at any stage and world size; all ranks pass the same `state`.

    Moments of int8 become float32 for an optimizer, such as torch's, that does not keep them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not isinstance(optimizer, ShardedOptimizer):
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        own, states = dict(zip(numbers, parameters)), dict(state["state"])
        for number, each in states.items():
            if (p := own.get(number)) is None:
                continue
            if getattr(optimizer, "state_dtype", None) != "int8":
                moments.check_fits(each, p.numel(), f"parameter {numbers.index(number)}")
                each = moments.wide(each, p)
            states[number] = as_dtensors(each, dict.fromkeys(each, p))
        state = {**state, "state": states}
    optimizer.load_state_dict(state)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module from a wrapper, or from torch.compile(wrapper); return a bare module unchanged."""
    inner = original_of(module)
    return inner.module if isinstance(inner, TorchDDP) else module
