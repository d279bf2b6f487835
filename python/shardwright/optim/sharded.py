"""An optimizer whose state and work are sliced over ranks: ZeRO-1.

The user's own optimizer does the arithmetic on one-dimensional tensors: the slices that this rank owns. An elementwise
update gives every element the same bits on a slice as on the whole, because slices are cut on 128-byte boundaries. This
class keeps the interface of the whole optimizer. `param_groups` are the user's own dictionaries over whole parameters,
so schedulers, zero_grad and clipping work as before.

References
----------
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._engine import Error
from ..comm.waits import on_every_rank
from ..layout.local_parameters import part_of, whole_of
from ..layout.memory import bytes_of
from ..layout.shard_runs import memory_order
from ..parallel.agreement.optimizer_agreement import (
    GRADIENTS,
    Row,
    agree,
    check_saved,
    hyperparameters,
    not_of,
    rows_of,
)
from ..parallel.join import A_GRADIENT, NO_GRADIENT, ZEROED, exchange_slices, state_of
from ..parallel.replica import Replica
from ..torch_compat.autograd import unguarded
from ..torch_compat.optimizers import hooks_around, on_meta, step_hooks
from ..torch_compat.state_dicts import asked_by_torchs_functions
from .forwarded_on_slices import call_on_slices
from .forwarding import Forwarding
from .master_weights import (
    LOW,
    as_kept,
    check_groups,
    has_own_masters,
    kept_by,
    load_with_hooks,
    masters_in_place,
)
from .sliceable import adopt, check_sliceable, members_of
from .state.sliced_state import MARK, SlicedState
from .state.travelling_state import beside, copied, description_of, from_memory_order, small_tensor
from .state.whole_state import StateNames, with_state

if TYPE_CHECKING:
    from .device_clip import DeviceClip


class ShardedOptimizer(Forwarding):
    """The optimizer that `sw.wrap(module, optimizer, zero=1)` returns.

    Parameters
    ----------
    optimizer : Optimizer
        The user's optimizer. Its groups are taken over unchanged; its state is sliced.
    replica : Replica
        The replica of the wrapped module, which must hold every parameter of the optimizer.
    partition : {"auto", "flat"}
        "auto" accepts torch's elementwise optimizers. "flat" accepts any: the caller vouches that it is elementwise.
        For "tensor" see optim/whole_tensors.py.

    without_master : collection of Tensor
        Low-precision parameters without a float32 master, by the user's policy. sw.optim's optimizers make masters of
        the others themselves; for other optimizers this class does.
    parts : sequence of Replica
        Further replicas of the module, for the parameters of groups=. Their ranks are among those of `replica`.
        Parameters are numbered across all replicas.

    Notes
    -----
    Memory: 1 / world_size of the optimizer's state. step() is collective: one exchange of 16 bytes a rank, then
    ParameterMemory.publish().
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replica: Replica,
        partition: str = "auto",
        without_master: Collection[torch.Tensor] = (),
        parts: Sequence[Replica] = (),
    ) -> None:
        check_sliceable(optimizer, partition)
        self.partition = partition
        self._inner = optimizer
        self.replica = self._replica = replica
        self.replicas = (replica, *parts)
        self._memory: Any = replica.parameters()
        #: by parameter number: its replica, storage and number in the replica
        self._places = [(r, r.parameters(), i) for r in self.replicas for i in range(len(r.table.parameters))]
        #: parameters by number
        self._parameters = [p for each in self.replicas for p in each.table.parameters]
        numbered = (p for each in self.replicas for p in each.table.module_parameters)
        self._index = {id(p): i for i, p in enumerate(numbered)}
        self._makes_masters = not has_own_masters(optimizer)
        self._without_master = {id(parameter) for parameter in without_master}
        self._slices: dict[int, torch.Tensor | None] = {}
        self._homes: dict[int, torch.Tensor] = {}  # the memory of the slices
        self._unmoved: set[int] = set()
        self._group_of: dict[int, dict[str, Any]] = {}
        self._consolidated: dict[int, dict[str, Any]] | None = None  # whole state by index, until state changes
        self._state_names: dict[int, list[str]] | None = None  # by index, equal on all ranks, until state changes
        for position, group in enumerate(optimizer.param_groups):
            self._check_members(group["params"], position)
        whole = dict(optimizer.state)
        if any(id(parameter) not in self._index for parameter in whole):
            raise ValueError(
                "optimizer: it holds state of tensors that are not its parameters, as after an earlier slicing: make a new optimizer, "
                "and carry the state over with sw.full_optimizer_state_dict and sw.load_full_optimizer_state_dict"
            )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        optimizer.state.clear()
        for parameter, state in whole.items():
            self._take_state(self._index[id(parameter)], state)
        #: the number of rounds at the last step
        self.rounds_at_step = 0
        self._position = replica.steppers.add_sliced(self)
        self._forwards = True

    def _check_members(self, parameters: Any, position: int) -> None:
        for parameter in parameters:
            if id(parameter) not in self._index:
                is_meta = parameter.is_meta
                raise ValueError(
                    on_meta(parameter, position) if is_meta else not_of(self._replica.label, parameter, position)
                )

    def replica_of(self, parameter: torch.Tensor) -> Replica:
        """Return the replica that holds a parameter."""
        return self._places[self._index[id(parameter)]][0]

    def _like(self, index: int) -> torch.Tensor:
        replica, _, at = self._places[index]
        return replica.layout_of(at)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return True if this optimizer steps on a parameter."""
        index = self._index.get(id(parameter))
        return index is not None and index in self._group_of

    def __repr__(self) -> str:
        return f"ShardedOptimizer(rank {self._replica.group.rank} of {self._replica.group.world_size}, {self._inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like torch. The user's own class sees it first and may refuse it."""
        if all(group is not param_group for group in self._inner.param_groups):
            self._check_members(members_of(param_group), len(self.param_groups))
            self._inner.add_param_group(param_group)
        super().add_param_group(param_group)
        self._consolidated = self._state_names = None
        self._group_of |= {self._index[id(p)]: self.param_groups[-1] for p in self.param_groups[-1]["params"]}

    def __getstate__(self) -> Any:
        raise Error("a sliced optimizer cannot be copied or pickled: use sw.full_optimizer_state_dict")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__getstate__()

    @property
    def state(self) -> Any:
        """The state of this rank's slices, keyed by slice. torch.distributed.checkpoint.state_dict gets only the names
        of state.
        """
        return StateNames(self._names_of_state) if asked_by_torchs_functions() else self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore the empty state of torch's constructor."""

    # stepping -----------------------------------------------------------------------------------------------------

    def slice_of(self, index: int) -> torch.Tensor | None:
        """Return this rank's slice of a parameter. The user's optimizer steps on it and keys its state by it."""
        _, memory, at = self._places[index]
        if index in self._slices and not (index in self._unmoved and memory.is_moved(at)):
            return self._slices[index]
        old = self._slices.get(index)
        piece = self._slices[index] = self._make_piece(index)
        if piece is not None:
            self._homes[index] = piece.detach()
        if memory.is_moved(at):
            self._unmoved.discard(index)
        else:
            self._unmoved.add(index)  # a frozen parameter moves when it is unfrozen
        if old is not None and piece is not None and old in self._inner.state:
            self._inner.state[piece] = self._inner.state.pop(old)
        return piece

    def piece_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return slice_of() a parameter of the module."""
        return self.slice_of(self._index[id(parameter)])

    def _make_piece(self, index: int) -> torch.Tensor | None:
        _, memory, at = self._places[index]
        piece: torch.Tensor | None = memory.slice(at)
        return piece

    def run(self, index: int, rank: int) -> tuple[int, int]:
        """Return [begin, end) of the elements of a parameter, in memory order, that `rank` of its group updates."""
        _, memory, at = self._places[index]
        begin, end = memory.run(at, rank)
        return begin, end

    @contextlib.contextmanager
    def _on_slices(self) -> Iterator[list[torch.Tensor]]:
        """Inside, give the user's optimizer slices instead of whole parameters, or masters if this class makes them."""
        whole = [group["params"] for group in self._inner.param_groups]
        slices, unmoved = self._slices, self._unmoved
        try:
            with_master = []
            for group in self._inner.param_groups:
                numbered = [(p, self._index[id(p)]) for p in group["params"]]
                pairs = [
                    (p, slices[i] if i in slices and i not in unmoved else self.slice_of(i)) for p, i in numbered
                ]  # no call for each
                group["params"] = [each for _, each in pairs if each is not None]
                if self._makes_masters:
                    with_master += [each for p, each in pairs if each is not None and self.has_master(p)]
            yield with_master
        finally:
            for group, parameters in zip(self._inner.param_groups, whole):
                group["params"] = parameters
            for index, home in self._homes.items():
                piece = self._slices[index]
                if piece is not None and piece.data_ptr() != home.data_ptr():  # replaced, p.data = ...
                    home.copy_(piece.detach())
                    piece.data = home

    def has_master(self, parameter: torch.Tensor) -> bool:
        """Return True if this class keeps a float32 master of a parameter."""
        return self._makes_masters and parameter.dtype in LOW and id(parameter) not in self._without_master

    def _as_kept(self, parameter: torch.Tensor, state: Mapping[str, Any], *, exactly: bool) -> Mapping[str, Any]:
        """Convert loaded state to the kept form, with or without a master.

        `exactly`: the state has the dtypes in which it was kept. Else it is in torch's format, which torch's own
        loading casts.
        """
        if not self._makes_masters:
            return kept_by(self._inner, parameter, state)
        has_master = self.has_master(parameter)
        return as_kept(state, parameter, has_master) if has_master or not exactly else state

    def _loaded(self) -> None:
        """Call the user's class to update loaded state, as torch's own loading does."""
        self._consolidated = self._state_names = None
        with self._on_slices():
            self._inner.__setstate__({"state": self._inner.state, "param_groups": self._inner.param_groups})

    def take_clip(self, clip: DeviceClip) -> bool:
        """Return True if the next step multiplies gradients by the factor of `clip`; else they must be clipped before.

        At zero=1 clip before: `.grad` is whole, and the step reads only a slice.
        """
        take = getattr(self._inner, "take_clip", None)
        return self._replica.zero >= 2 and take is not None and not step_hooks(self._inner) and bool(take(clip))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Load like torch's method."""
        with unguarded():
            super().zero_grad(set_to_none)

    def _take_gradients(self, gradient_of: Callable[[int], torch.Tensor | None]) -> None:
        with unguarded():
            for group in self.param_groups:
                for parameter in group["params"]:
                    index = self._index[id(parameter)]
                    piece = self.slice_of(index)
                    self._take_gradient(index, piece, gradient_of(index))

    def _own_gradient(self, index: int) -> torch.Tensor | None:
        replica, _, at = self._places[index]
        return replica.gradients.slice_of(at)

    def _take_gradient(self, index: int, piece: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
        if piece is not None:
            piece.grad = gradient

    def _complete_gradients(self) -> None:
        """Finish the gradients once all ranks are known to step."""

    def _publish(self, failed: bool) -> list[int] | None:
        """Make this rank's slices visible to all. Return which ranks failed; None if that needs a separate exchange."""
        outcomes: list[int] | None = self._memory.publish(failed=failed)
        for part in self.replicas[1:]:  # the first replica's publish reports the failure to their ranks
            part.parameters().publish(failed=None)
        return outcomes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's slices; afterwards every rank has every update. Collective.

        Raises
        ------
        Error
            If hyperparameters differ between ranks; it names each group and both values.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            for replica in self.replicas:
                replica.rounds.close_pending()
        check_groups(self, self._inner)
        self._replica.join_link.announce(
            "step", self._position, [hyperparameters(group) for group in self.param_groups]
        )
        if self._replica.zero == 1 and self._replica.join_link.is_on:
            exchange_slices(self._replica, self.run)
        with unguarded():
            held, index = self._parameters, self._index
            states = {p: state_of(held[index[id(p)]].grad) for group in self.param_groups for p in group["params"]}
        self._step_together(self._own_gradient, states)
        return loss

    def shadow_step(
        self, groups: list[dict[str, Any]], gradients: list[torch.Tensor | None], states: Sequence[int]
    ) -> None:
        """Take part in a step of the training ranks as a joined rank. Collective.

        The joined rank steps on its slices with announced hyperparameters and gradients. `states`: see state_of, for
        every parameter of the module.
        """
        self._replica.access.before_writes()
        for group, theirs in zip(self.param_groups, groups):
            adopt(group, theirs)
        check_groups(self, self._inner)
        told = {p: states[self._index[id(p)]] for group in self.param_groups for p in group["params"]}
        self._step_together(gradients.__getitem__, told)

    def _step_together(
        self, gradient_of: Callable[[int], torch.Tensor | None], states: Mapping[torch.Tensor, int]
    ) -> None:
        """Step on this rank's slices and publish them, collectively. `states`: see state_of, for its own parameters."""
        refusal: Exception | None = None
        try:
            self._replica.backend.refuse_capture("an optimizer's step")
            self._take_gradients(gradient_of)
        except (Error, NotImplementedError) as error:  # the peers get the error before they wait for this rank's slices
            refusal = error
        if self._replica.check is not None:
            gradients = (gradient_of(self._index[id(parameter)]) for parameter in states)
            try:
                self._replica.check.refuse(self, gradients, [each.model_ranks for each in self.replicas], refusal)
            except (Error, NotImplementedError) as error:
                refusal = error
        with contextlib.ExitStack() as announced:  # to forked children, before a peer, which has agreed, writes
            for replica in self.replicas:
                announced.enter_context(replica.access.changing())
            try:
                self._agree(refusal, states)
            except Exception:
                self.refuse_change()
                raise
            rounds = self._replica.reducer.rounds
            vars(self).update(_consolidated=None, _state_names=None, rounds_at_step=rounds)  # spares three __setattr__
            stepped = [parameter for parameter, state in states.items() if state != NO_GRADIENT]
            self._write_together(self._inner.step, "step", stepped)

    def _write_together(
        self,
        call: Callable[[], Any],
        name: str,
        written: list[torch.Tensor],
        around: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Any:
        """Call a method of the user's optimizer on this rank's slices and publish them. Collective.

        `around`: a context around a method other than step, which may write to each parameter that has state, with or
        without a gradient.
        """
        with contextlib.ExitStack() as writing:
            for replica in self.replicas:
                writing.enter_context(replica.access.writing())
            result, failure = self._run_on_slices(call, around)
            outcomes = self._publish(failure is not None)  # after a failure too: slices stay equal
        self._count_writes(written)
        if outcomes is None or any(outcomes):
            self._tell(failure, name)
        return result

    def refuse_change(self) -> None:
        """Note that all ranks refuse a call, if they have agreed on it."""
        for replica in self.replicas:
            replica.access.refuse_change(self._replica.group.comm)

    def _call(self, name: str, method: Callable[[], Any]) -> Any:
        return call_on_slices(self, name, method)

    def _tell(self, failure: Exception | None, name: str) -> None:
        """Raise this rank's error, or report another rank's: all ranks raise, and the next step works as usual."""
        mine = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()
        said = self._replica.group.comm.all_gather_bytes(mine, "outcome of a step")
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text:
                raise Error(
                    f"rank {rank}: the optimizer's {name} failed, so that some slices are as before it: {text.decode()}"
                )

    def _run_on_slices(
        self, call: Callable[[], Any], around: contextlib.AbstractContextManager[Any] | None
    ) -> tuple[Any, Exception | None]:
        """Return the call's result; and its error, if the ranks can go on together after it."""
        comm = self._replica.group.comm
        try:
            for replica in self.replicas:
                replica.parameters().take_writes()
            self._complete_gradients()
            masters = functools.partial(masters_in_place, self._inner, stateful=around is not None)
            with around or contextlib.nullcontext(), self._on_slices() as low, masters(low):
                return call(), None
        except BaseException as error:
            if isinstance(error, Exception) and comm.is_alive:
                return None, error
            if comm.is_alive:  # the peers, which wait for this rank's slices, must get the error
                comm.abort(f"the optimizer's step was broken off: {error!r}")
            raise
        finally:
            for piece in self._slices.values():
                if piece is not None:
                    piece.grad = None

    def _count_writes(self, stepped: list[torch.Tensor]) -> None:
        for replica in self.replicas:
            own = stepped if len(self.replicas) == 1 else [p for p in stepped if self.replica_of(p) is replica]
            replica.access.count_writes(own)

    def _facts(self, replica: Replica, states: Mapping[torch.Tensor, int]) -> dict[str, Any]:
        """Return the values besides the groups on which a replica's ranks must agree before a step."""
        names, index, places = replica.table.names, self._index, self._places
        without = [
            (names[places[index[id(p)]][2]], state)
            for p, state in states.items()
            if state != A_GRADIENT and places[index[id(p)]][0] is replica
        ]
        return {
            "factors that gradients were scaled by": replica.gradients.factors(),
            "parameters without a gradient": [name for name, state in without if state == NO_GRADIENT],
            "parameters whose gradient was zeroed": [name for name, state in without if state == ZEROED],
        }

    def _agree(self, refusal: Exception | None, states: Mapping[torch.Tensor, int]) -> None:
        """Check that no backward is open on any rank, and that all ranks step with the same hyperparameters and
        factors.
        """
        label = "hyperparameters of a step"
        checks: list[Any] = []
        if self._replica.check is not None:  # all parts have the same options
            checks = [replica.check for replica in self.replicas]
        try:
            for part in self.replicas[1:]:  # the first replica's ranks are all ranks: pass on what these find
                try:
                    rows: list[Row] = [(GRADIENTS, [], self._facts(part, states))]
                    agree(part.group.comm.all_gather_bytes, rows, refusal, label)
                except (Error, NotImplementedError) as error:
                    refusal = error
            rows = rows_of(self, self._index)
            rows.append((GRADIENTS, [], self._facts(self._replica, states)))
            agree(self._replica.group.comm.all_gather_bytes, rows, refusal, label)
        except Error as error:
            if checks:
                checks[0].explain_not_finite(error, checks[1:])
            raise
        finally:
            refusal = None  # its traceback holds this frame
        for check in checks:
            check.count_step(self)
        for replica in self.replicas:
            replica.gradients.accept_factors()

    # state --------------------------------------------------------------------------------------------------------

    def _take_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Keep this rank's slices of a whole parameter's state."""
        piece = self.slice_of(index)
        if piece is None:
            return
        parameter = self._like(index)
        replica, memory, at = self._places[index]
        low, high = memory.run(at, replica.group.rank)
        kept: dict[str, Any] = {}
        for key, value in state.items():
            value = part_of(self._parameters[index], value)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                value = memory_order(value, parameter)[low:high].clone()
            elif (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.numel() == 1
                and key != "step"
            ):
                value = value.reshape(1).clone()
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            kept[key] = value
        self._inner.state[piece] = self._placed(index, kept, piece)

    def _placed(self, index: int, state: Mapping[str, Any], piece: torch.Tensor) -> dict[str, Any]:
        """Move loaded state to the device on which a step needs it. The step itself moves offloaded state."""
        if getattr(self._inner, "store", None) is not None:
            return dict(state)
        return beside(state, piece, self._group_of[index])

    def _layout(self) -> list[Any]:
        group = self._replica.group
        runs = [[i, *memory.run(at, each.group.rank)] for i, (each, memory, at) in enumerate(self._places)]
        return [group.rank, group.world_size, runs]

    @on_every_rank("optimizer.state_dict()")
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices. load_state_dict() loads them at the same rank, world size and bucket size.

        Never communicates. Pickling the result raises an Error: a file of one rank's slices would look like the whole
        state. If this rank has the whole state, return torch's ordinary format: nothing is sliced (one rank, or rows of
        one rank), or consolidate_state_dict() ran since the last step. The functions of
        torch.distributed.checkpoint.state_dict, which every rank calls, get the gathered state as from
        full_state_dict().
        """
        before, after = hooks_around(self, "state_dict")
        for hook in before:
            hook(self)
        if asked_by_torchs_functions():
            with with_state(self):
                made = self.full_state_dict()
        elif self._consolidated is not None:
            made = self._in_torchs_format(self._consolidated.__getitem__)
        elif self._replica.slicing.count == 1:
            made = self._in_torchs_format(self._whole_state)
        else:
            made = {MARK: SlicedState(self._slices_of_state())}
        for made_hook in after:
            changed = made_hook(self, made)
            made = made if changed is None else changed
        return made

    def own_slices(self) -> dict[str, Any]:
        """Return a state for a file that only this rank reads; load_state_dict() loads it on this rank."""
        return {MARK: self._slices_of_state()}

    def _slices_of_state(self) -> dict[str, Any]:
        indices = [[self._index[id(p)] for p in group["params"]] for group in self.param_groups]
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "indices": each}
            for group, each in zip(self.param_groups, indices)
        ]
        state = {}
        for index in sorted({i for each in indices for i in each}):
            piece = self.slice_of(index)
            if piece is not None and piece in self._inner.state:
                state[index] = dict(self._inner.state[piece])
        return {"layout": self._layout(), "groups": groups, "state": state}

    def _whole_state(self, index: int) -> dict[str, Any]:
        """Return a parameter's whole state, without copies, on a rank that has all of it."""
        piece = self.slice_of(index)
        if piece is None:
            return {}
        like = self._like(index)
        return {
            key: value.as_strided(like.shape, like.stride(), value.storage_offset())
            if isinstance(value, torch.Tensor) and key != "step" and value.shape == piece.shape
            else value
            for key, value in self._inner.state.get(piece, {}).items()
        }

    @on_every_rank("optimizer.load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state_dict(), or an ordinary whole state that is equal on every rank.

        Raises
        ------
        ValueError
            For slices of another rank, world size or layout, or groups of other sizes.
        """
        load_with_hooks(self, self._load, state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        if MARK not in state_dict:
            self._load_whole(state_dict)
            return
        saved = state_dict[MARK]
        saved = saved.content if isinstance(saved, SlicedState) else saved
        if saved["layout"] != self._layout():
            raise ValueError(
                f"optimizer state: slices of rank {saved['layout'][0]} of {saved['layout'][1]} do not fit rank "
                f"{self._replica.group.rank} of {self._replica.group.world_size} (or another bucket size): use "
                "sw.full_optimizer_state_dict to save what loads anywhere"
            )
        self._load_groups(saved["groups"], "indices")
        self._inner.state.clear()
        for index, state in saved["state"].items():
            piece = self.slice_of(int(index))
            assert piece is not None
            parameter = self._parameters[int(index)]
            kept = {k: copied(v) for k, v in self._as_kept(parameter, state, exactly=True).items()}
            self._inner.state[piece] = self._placed(int(index), kept, piece)
        self._loaded()

    def _load_groups(self, groups: list[dict[str, Any]], members: str) -> None:
        check_saved(self._inner, groups)
        if [len(group[members]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"optimizer state: groups of {[len(group[members]) for group in groups]} parameters do not fit "
                f"{[len(group['params']) for group in self.param_groups]}"
            )
        for group, saved in zip(self.param_groups, groups):
            group.update({k: copy.deepcopy(v) for k, v in saved.items() if k not in ("params", "indices")})

    def _load_whole(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        self._load_groups(groups, "params")
        parameters = [p for group in self.param_groups for p in group["params"]]
        names = [name for group in groups for name in group["params"]]
        self._inner.state.clear()
        for name, parameter in zip(names, parameters):
            if name in state_dict["state"]:
                state = self._as_kept(parameter, state_dict["state"][name], exactly=False)
                self._take_state(self._index[id(parameter)], state)
        self._loaded()

    @on_every_rank("optimizer.consolidate_state_dict()")
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state on rank `to`. Its state_dict() then returns torch's ordinary format until the next
        step. Collective.

        The name and the argument are those of torch's ZeroRedundancyOptimizer.

        Cost: the state's bytes to every rank, one tensor at a time; only rank `to` needs memory for the whole state.
        """
        group = self._replica.group
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < group.world_size:
            raise ValueError(f"consolidate_state_dict: to must be a rank in [0, {group.world_size}), got {to!r}")
        whole = {}
        for index in self._positions():
            state = self._gather_state(index)
            if group.rank == to:
                whole[index] = state
        self._consolidated = whole if group.rank == to else None

    def full_state_dict(self) -> dict[str, Any]:
        """Return torch's ordinary state_dict of the whole optimizer, on every rank. Collective.

        Cost: the state's bytes to every rank, and as much memory.
        """
        made = self._in_torchs_format(self._gather_state)
        return {**made, "param_groups": copy.deepcopy(made["param_groups"])}

    def _positions(self) -> dict[int, int]:
        """Map a parameter's index in the table to its number in torch's state dicts."""
        positions: dict[int, int] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                positions.setdefault(self._index[id(parameter)], len(positions))
        return positions

    def _in_torchs_format(self, state_of: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        positions = self._positions()
        groups = [
            {
                **{k: v for k, v in g.items() if k != "params"},
                "params": [positions[self._index[id(p)]] for p in g["params"]],
            }
            for g in self.param_groups
        ]
        state = {position: state_of(index) for index, position in positions.items()}
        return {"state": {position: each for position, each in state.items() if each}, "param_groups": groups}

    # slices, for checkpoints --------------------------------------------------------------------------------------

    def held_run(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Return [begin, end) of the elements, in memory order, of which this rank keeps the state; None if it keeps
        none.
        """
        index = self._index[id(parameter)]
        return None if self.slice_of(index) is None else self.run(index, self._places[index][0].group.rank)

    def layout_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape and strides of a parameter, released or not. Its values must not be read."""
        return self._like(self._index[id(parameter)])

    def layouts(self) -> Iterator[torch.Tensor]:
        """Return layout_of() for each of the optimizer's parameters."""
        return (self.layout_of(parameter) for group in self.param_groups for parameter in group["params"])

    def held_state(self, parameter: torch.Tensor) -> tuple[Mapping[str, Any], torch.Tensor | None, int]:
        """Return (state of this rank's slice of a parameter, the slice or None, its first element)."""
        piece, run = self.piece_of(parameter), self.held_run(parameter)
        state = self._inner.state.get(piece, {}) if piece is not None else {}
        return state, piece, run[0] if run else 0

    def as_held(self, parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of held_run() in the form of the state."""
        return flat

    def empty_state(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a one-dimensional tensor, where state is kept, for elements of a slice's state that will be loaded."""
        store = getattr(self._inner, "store", None)
        return (
            torch.empty(numel, dtype=dtype, device="cpu")
            if store is None
            else store.empty(torch.empty(numel, dtype=dtype, device="meta"), dtype)
        )

    def gathered_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's full state. Collective."""
        return self._gather_state(self._index[id(parameter)])

    def load_held_state(
        self,
        groups: list[dict[str, Any]],
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        *,
        keep_others: bool = False,
    ) -> None:
        """Load the state of this rank's slices, and groups as in torch's state dicts. Never communicates.

        `keep_others`: parameters that `states` lacks keep their state.
        """
        self._load_groups(groups, "params")
        if not keep_others:
            self._inner.state.clear()
        for parameter, state in states.items():
            piece = self.piece_of(parameter)
            assert piece is not None
            kept = self._as_kept(parameter, state, exactly=True)
            self._inner.state[piece] = self._placed(self._index[id(parameter)], kept, piece)
        self._loaded()

    def _names_of_state(self, parameter: torch.Tensor) -> list[str]:
        """Return the names of a parameter's state. The first call after a change is collective."""
        if self._state_names is None:
            with with_state(self):
                self._state_names = {index: list(self._described(index)[1]) for index in self._positions()}
        return self._state_names[self._index[id(parameter)]]

    def _described(self, index: int) -> tuple[Mapping[str, Any], dict[str, Any], str]:
        """Return (this rank's state of a parameter, each entry's form on the ranks that have it, a label). Collective."""
        piece = self.slice_of(index)
        mine = self._inner.state.get(piece, {}) if piece is not None else {}
        replica, _, at = self._places[index]
        label = f"optimizer state of {replica.table.names[at]}"
        said = replica.group.comm.all_gather_bytes(description_of(mine, piece).encode(), label)
        return mine, next((each for each in map(json.loads, said) if each), {}), label

    def _gather_state(self, index: int) -> dict[str, Any]:
        replica, memory, at = self._places[index]
        comm, parameter = replica.group.comm, self._like(index)
        mine, described, label = self._described(index)
        whole: dict[str, Any] = {}
        for key, (kind, dtype, value) in described.items():
            if kind != "sliced":
                whole[key] = small_tensor(value, dtype) if kind == "tensor" else value
                continue
            held = key in mine and replica.slicing.speaks
            data = bytes_of(mine[key]) if held else b""
            pieces = comm.all_gather_bytes(data, label)
            result = torch.empty_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
            flat = memory_order(result, parameter)
            for rank, each in enumerate(pieces):
                low, high = memory.run(at, rank)
                if low < high and each:
                    flat[low:high] = torch.frombuffer(bytearray(each), dtype=flat.dtype)
            result = result if flat.data_ptr() == result.data_ptr() else from_memory_order(flat, parameter)
            whole[key] = whole_of(self._parameters[index], result)
        return whole
