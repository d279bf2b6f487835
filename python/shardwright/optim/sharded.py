"""An optimizer whose state and work are sliced over ranks: ZeRO-1 (Rajbhandari et al., 2020, section 5).

The user's own optimizer does the arithmetic on what this rank owns: slices, one-dimensional, or whole tensors
(optim/ownership.py). An elementwise update gives every element the same bits on a slice as on the whole, because slices
are cut on 128-byte boundaries. `param_groups` are the user's own dictionaries over whole parameters, so schedulers,
zero_grad and clipping work as before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from .._engine import Error
from ..comm.waits import on_every_rank
from ..gradients.module_gradients import A_GRADIENT, NO_GRADIENT, ZEROED, states_of
from ..layout.local_parameters import part_of
from ..layout.shard_runs import memory_order
from ..options.checks import count
from ..parallel.agreement.optimizer_agreement import (
    GRADIENTS,
    Row,
    agree,
    check_groups,
    check_members,
    check_saved,
    hyperparameters,
    rows_of,
)
from ..parallel.join import exchange_slices
from ..parallel.replica import Replica
from ..torch_compat.autograd import profiler_enabled, set_gradient, unguarded
from ..torch_compat.dtensor import is_dtensor
from ..torch_compat.optimizers import hooks_around, step_hooks
from ..torch_compat.state_dicts import asked_by_torchs_functions
from . import moments
from .device_clip import DeviceClip
from .forwarded_on_slices import call_on_slices
from .forwarding import Forwarding, loss_of
from .master_weights import LOW, as_kept, has_own_masters, kept_by, load_with_hooks, masters_in_place
from .ownership import Entry, WholeTensors, adopt, members_of, owner_of
from .rules import resolve
from .sliced_state import MARK, SlicedState, StateNames, beside, with_state

_parameter_of = operator.attrgetter("parameter")
_GradientOf = Callable[[Entry], torch.Tensor | None]


class ShardedOptimizer(Forwarding):
    """The optimizer that `sw.wrap(module, optimizer, zero=1)` returns.

    It takes the user's groups over unchanged, and slices the state over the ranks of `replica`, the module's engine, or
    of one of `parts`, the engines of groups=. Parameters are numbered across all engines. It keeps masters of
    low-precision parameters for optimizers that keep none themselves, but for `without_master`.

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
        self.partition = partition = resolve(optimizer, partition, replica.group.world_size)
        self._inner = optimizer
        self._slice_over((replica, *parts))
        self._makes_masters = not has_own_masters(optimizer)
        self._without_master = {id(parameter) for parameter in without_master}
        check_members(replica.label, self._index, optimizer.param_groups, all_of_them=True)
        whole = dict(optimizer.state)
        if any(id(parameter) not in self._index for parameter in whole):
            raise ValueError(
                "optimizer: it holds state of tensors that are not its parameters, as after an earlier slicing: make a new optimizer, "
                "and carry the state over with sw.full_optimizer_state_dict and sw.load_full_optimizer_state_dict"
            )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        optimizer.state.clear()
        for parameter, state in whole.items():
            self._take_state(self._entry(parameter), state)
        self._position = replica.steppers.add_sliced(self)
        self._forwards = True

    def _slice_over(self, replicas: tuple[Replica, ...]) -> None:
        self.replica = self._replica = replicas[0]
        self.replicas = replicas
        places = [(each, at) for each in replicas for at in range(len(each.table.parameters))]
        self._entries = [Entry(index, each, at) for index, (each, at) in enumerate(places)]
        self._index = {id(entry.member): entry.index for entry in self._entries}
        self._owner = owner_of(self.partition, replicas, self._inner)
        self._consolidated: dict[Entry, dict[str, Any]] | None = None  # whole state, until state changes
        self._state_names: dict[Entry, list[str]] | None = None  # equal on all ranks, until state changes
        #: the number of rounds at the last step
        self.rounds_at_step = 0

    def follow(self, replicas: Sequence[Replica]) -> None:
        """Slice over the ranks of newer replicas of the same module; the state is empty until it is loaded."""
        self._inner.state.clear()
        self._slice_over(tuple(replicas))
        for group in self.param_groups:
            self._join(group)
        self._position = self.replica.steppers.add_sliced(self)

    def _entry(self, parameter: torch.Tensor) -> Entry:
        return self._entries[self._index[id(parameter)]]

    def _members(self) -> list[Entry]:
        """Return the entries of the optimizer's parameters, in order of its groups."""
        entries, index = self._entries, self._index
        return [entries[index[id(p)]] for group in self.param_groups for p in group["params"]]

    def replica_of(self, parameter: torch.Tensor) -> Replica:
        return self._entry(parameter).replica

    def holds(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._index and self._entry(parameter).group is not None

    def __repr__(self) -> str:
        return f"ShardedOptimizer(rank {self._replica.group.rank} of {self._replica.group.world_size}, {self._inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like torch. The user's own class sees it first and may refuse it."""
        if all(group is not param_group for group in self._inner.param_groups):
            groups = [{"params": members_of(param_group)}]
            check_members(self._replica.label, self._index, groups, all_of_them=True, first=len(self.param_groups))
        super().add_param_group(param_group)
        self._consolidated = self._state_names = None
        self._join(self.param_groups[-1])

    def _join(self, group: dict[str, Any]) -> None:
        entries = [self._entry(p) for p in group["params"]]
        for entry in entries:
            entry.group = group
        self._owner.assign(entries)

    def __getstate__(self) -> Any:
        raise Error("a sliced optimizer cannot be copied or pickled: use sw.full_optimizer_state_dict")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__getstate__()

    @property
    def state(self) -> Any:
        """The state of this rank's slices, keyed by slice; torch.distributed.checkpoint.state_dict gets only names."""
        return StateNames(self._names_of_state) if asked_by_torchs_functions() else self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """Replace the state of this rank's slices, most often by none; the empty state of torch's constructor is ignored."""
        if not self._forwards:
            return
        if any(id(key) in self._index and self._entry(key).piece is not key for key in value):
            raise Error(
                "optimizer.state was given state of whole parameters, of which each rank keeps slices: call "
                "sw.load_full_optimizer_state_dict, or optimizer.load_state_dict"
            )
        self._inner.state, self._consolidated, self._state_names = value, None, None

    def _piece(self, entry: Entry) -> torch.Tensor | None:
        """Return what this rank owns of a parameter. The user's optimizer steps on it and keys its state by it."""
        if entry.is_final or (entry.is_final is False and not entry.memory.is_moved(entry.at)):
            return entry.piece
        old, entry.piece = entry.piece, self._owner.piece(entry)
        entry.home = None if entry.piece is None else entry.piece.detach()
        entry.is_final = entry.memory.is_moved(entry.at)
        if old is not None and entry.piece is not None and old in self._inner.state:
            self._inner.state[entry.piece] = self._inner.state.pop(old)
        return entry.piece

    def piece_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's slice of a parameter of the module."""
        return self._piece(self._entry(parameter))

    def run(self, index: int, rank: int) -> tuple[int, int]:
        """Return [begin, end) of the elements of a parameter, in memory order, that `rank` of its group updates."""
        return self._owner.run(self._entries[index], rank)

    @contextlib.contextmanager
    def _on_slices(self, of_groups: Sequence[Sequence[Entry]] | None = None) -> Iterator[list[torch.Tensor]]:
        """Inside, give the user's optimizer slices instead of whole parameters, or masters if this class makes them.

        `of_groups`: only these of each group, with the origins as they are.
        """
        whole = [group["params"] for group in self._inner.param_groups]
        entries, index = self._entries, self._index
        try:
            with_master = []
            if of_groups is None and getattr(self._inner, "state_dtype", None) is not None:
                vars(self._inner).update(origins=self._origins())
            for number, group in enumerate(self._inner.param_groups):
                members = [entries[index[id(p)]] for p in group["params"]] if of_groups is None else of_groups[number]
                pairs = [(e, e.piece if e.is_final else self._piece(e)) for e in members]  # no call for each
                group["params"] = [piece for _, piece in pairs if piece is not None]
                if self._makes_masters:  # no call for others
                    low = [(e, each) for e, each in pairs if each is not None and e.member.dtype in LOW]
                    with_master += [each for e, each in low if self.has_master(e.member)]
            yield with_master
        finally:
            for group, parameters in zip(self._inner.param_groups, whole):
                group["params"] = parameters
            for entry in entries if of_groups is None else chain.from_iterable(of_groups):
                piece, home = entry.piece, entry.home
                if piece is not None and home is not None and piece.data_ptr() != home.data_ptr():  # p.data = ...
                    home.copy_(piece.detach())
                    piece.data = home

    def _origins(self) -> dict[int, int]:
        """Return where the pieces begin, as sw.optim reads it."""
        runs = ((number, e, self.run(e.index, e.replica.group.rank)) for number, e in enumerate(self._members()))
        return {id(self._piece(e)): (number << 40) + low for number, e, (low, _) in runs}

    def has_master(self, parameter: torch.Tensor) -> bool:
        """Return True if this class keeps a float32 master of a parameter."""
        return self._makes_masters and parameter.dtype in LOW and id(parameter) not in self._without_master

    def take_clip(self, clip: DeviceClip) -> bool:
        """Return True if the next step multiplies gradients by the factor of `clip`; else clip them before."""
        take = getattr(self._inner, "take_clip", None)
        if self._replica.zero < 2 or self._owner.is_whole:  # `.grad` is whole, or is sent to the tensors' owners
            return False
        return take is not None and not step_hooks(self._inner) and bool(take(clip))

    def zero_grad(self, set_to_none: bool = True) -> None:
        with unguarded():
            if not set_to_none or profiler_enabled():
                return super().zero_grad(set_to_none)
            for group in self.param_groups:
                for parameter in group["params"]:
                    set_gradient(parameter, None)

    def _take_gradients(self, gradient_of: _GradientOf, entries: Iterable[Entry]) -> None:
        owner = self._owner
        if isinstance(owner, WholeTensors):
            owner.begin()
        with unguarded():
            for entry in entries:
                if not entry.is_final:
                    self._piece(entry)
                if isinstance(owner, WholeTensors):
                    owner.take(entry, gradient_of(entry))
                elif entry.piece is not None:
                    entry.piece.grad = gradient_of(entry)
                else:
                    gradient_of(entry)  # raises for one that is not averaged

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's slices; afterwards every rank has every update. Collective.

        Raises Error if hyperparameters differ between ranks; it names each group and both values.
        """
        loss = None
        if closure is not None:
            loss = loss_of(closure)
            for replica in self.replicas:
                replica.gradients.close_pending()
        check_groups(self, self._inner)
        if self._replica.announcer is not None:
            groups = [hyperparameters(group) for group in self.param_groups]
            self._replica.announce("step", self._position, groups)
            if self._replica.zero == 1 and self._replica.in_sliced_join:
                exchange_slices(self._replica, self.run)
        members = self._members()
        with unguarded():
            states = dict(zip(members, states_of(map(_parameter_of, members))))
        self._step_together(self._owner.gradient, states)
        return loss

    def shadow_step(
        self, groups: list[dict[str, Any]], gradients: list[torch.Tensor | None], states: Sequence[int]
    ) -> None:
        """Step on this rank's slices as a joined rank, with announced hyperparameters and gradients. Collective."""
        self._replica.access.before_writes()
        for group, theirs in zip(self.param_groups, groups):
            adopt(group, theirs)
        check_groups(self, self._inner)
        announced = {entry: states[entry.index] for entry in self._members()}
        self._step_together(lambda entry: gradients[entry.index], announced)

    def _step_together(self, gradient_of: _GradientOf, states: Mapping[Entry, int]) -> None:
        """Step on this rank's slices and publish them, collectively. `states`: of states_of(), for its own parameters."""
        refusal: Exception | None = None
        try:
            if self._replica.link is not None:
                self._replica.link.refuse_capture("an optimizer's step")
            self._take_gradients(gradient_of, states)
        except (Error, NotImplementedError) as error:  # the peers get the error before they wait for this rank's slices
            refusal = error
        if self._replica.check is not None:
            gradients = map(gradient_of, states)
            try:
                self._replica.check.refuse(self, gradients, [each.model_ranks for each in self.replicas], refusal)
            except (Error, NotImplementedError) as error:
                refusal = error
        with self._changing(functools.partial(self._agree, refusal, states)):
            rounds = self._replica.reducer.rounds
            vars(self).update(_consolidated=None, _state_names=None, rounds_at_step=rounds)  # spares three __setattr__
            stepped = [entry for entry, state in states.items() if state != NO_GRADIENT]
            self._write_together(self._inner.step, "step", stepped)

    @contextlib.contextmanager
    def _changing(self, agree_on: Callable[[], None]) -> Iterator[None]:
        """Inside, values change on all ranks, which first agree. Forked children hear of it before a peer writes."""
        with contextlib.ExitStack() as announced:
            for replica in self.replicas:
                if replica.access.shows_writes:
                    announced.enter_context(replica.access)
            try:
                agree_on()
            except Exception:
                for replica in self.replicas:
                    replica.access.refuse_change(self._replica.group.comm)
                raise
            yield

    def _write_together(
        self,
        call: Callable[[], Any],
        name: str,
        written: list[Entry],
        around: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Any:
        """Call a method of the user's optimizer on this rank's slices and publish them. Collective.

        `around`: a context around a method other than step, which may write to parameters that have state and no
        gradient.
        """
        with contextlib.ExitStack() as writing:
            for replica in self.replicas:
                writing.enter_context(replica.access.writing())
            result, failure = self._run_on_slices(call, around)
            outcomes = self._owner.publish(self.replicas, failure is not None)  # after a failure too: slices stay equal
        for replica in self.replicas:
            replica.access.count_writes([entry.member for entry in written if entry.replica is replica])
        if outcomes is None or any(outcomes):
            self._raise_failure(failure, name)
        return result

    def _call(self, name: str, method: Callable[[], Any]) -> Any:
        return call_on_slices(self, name, method)

    def _raise_failure(self, failure: Exception | None, name: str) -> None:
        """Raise this rank's error, or report another rank's: all ranks raise, and the next step works as usual."""
        mine = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()
        replies = self._replica.group.comm.all_gather_bytes(mine, "outcome of a step")
        if failure is not None:
            raise failure
        for rank, reply in enumerate(map(bytes.decode, replies)):
            if reply:
                what = f"rank {rank}: the optimizer's {name} failed"
                raise Error(f"{what}, so that some slices are as before it: {reply}")

    def _run_on_slices(
        self, call: Callable[[], Any], around: contextlib.AbstractContextManager[Any] | None
    ) -> tuple[Any, Exception | None]:
        """Return the call's result; and its error, if the ranks can go on together after it."""
        comm = self._replica.group.comm
        try:
            for replica in self.replicas:
                if replica.zero == 3:
                    replica.parameters().take_writes()
            if isinstance(self._owner, WholeTensors):
                self._owner.complete()
            with around or contextlib.nullcontext(), self._on_slices() as low:
                if not low:
                    return call(), None
                with masters_in_place(self._inner, low, stateful=around is not None):
                    return call(), None
        except BaseException as error:
            if isinstance(error, Exception) and comm.is_alive:
                return None, error
            if comm.is_alive:  # the peers, which wait for this rank's slices, must get the error
                comm.abort(f"the optimizer's step was broken off: {error!r}")
            raise
        finally:
            for entry in self._entries:
                if entry.piece is not None:
                    entry.piece.grad = None

    def _facts(self, replica: Replica, states: Mapping[Entry, int]) -> dict[str, Any]:
        """Return the values besides the groups on which a replica's ranks must agree before a step."""
        names = replica.table.names
        without: dict[int, list[str]] = {NO_GRADIENT: [], ZEROED: [], A_GRADIENT: []}
        for entry, state in states.items():
            if state != A_GRADIENT and entry.replica is replica:
                without[state].append(names[entry.at])
        return {
            "factors that gradients were scaled by": replica.gradients.factors(),
            "parameters without a gradient": without[NO_GRADIENT],
            "parameters whose gradient was zeroed": without[ZEROED],
        }

    def _agree(self, refusal: Exception | None, states: Mapping[Entry, int]) -> None:
        """Check that no backward is open on any rank, and that all step with the same hyperparameters and factors."""
        label = "hyperparameters of a step"
        # all parts have the same options
        checks: list[Any] = [] if self._replica.check is None else [each.check for each in self.replicas]

        def rows(replica: Replica) -> list[Row]:
            if refusal is not None:
                raise refusal
            own = rows_of(self, self._index) if replica is self._replica else []
            return [*own, (GRADIENTS, [], self._facts(replica, states))]

        try:
            for part in self.replicas[1:]:  # the first replica's ranks are all ranks: pass on what these find
                try:
                    agree(part.group.comm, functools.partial(rows, part), label)
                except (Error, NotImplementedError) as error:
                    refusal = error
            agree(self._replica.group.comm, functools.partial(rows, self._replica), label)
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

    def _take_state(self, entry: Entry, state: Mapping[str, Any], *, loaded: bool = False) -> None:
        """Keep this rank's slice of a whole state. `loaded`: in torch's format; else in the kept form."""
        piece = self._piece(entry)
        if piece is None:
            return
        like, (low, high) = entry.like, self.run(entry.index, entry.replica.group.rank)
        kept = dict[str, Any]()
        for key, value in state.items():
            value = part_of(entry.parameter, value)
            if moments.is_records(key, value):
                kept[key] = value[low // moments.BLOCK : moments.blocks(high)].clone()
                continue
            if isinstance(value, torch.Tensor):
                is_cut = value.shape == like.shape and not self._owner.is_whole and (value.dim() > 0 or key != "step")
                value = (memory_order(value, like)[low:high] if is_cut else value).clone()
            kept[key] = value
        whole = self._as_kept(entry, kept, exactly=False) if loaded else kept
        self._inner.state[piece] = self._placed(entry, whole, piece)

    def _placed(self, entry: Entry, state: Mapping[str, Any], piece: torch.Tensor) -> dict[str, Any]:
        """Move loaded state to the device on which a step needs it. The step itself moves offloaded state."""
        if getattr(self._inner, "store", None) is not None:
            return dict(state)
        assert entry.group is not None
        return beside(state, piece, entry.group)

    def _as_kept(self, entry: Entry, state: Mapping[str, Any], *, exactly: bool) -> Mapping[str, Any]:
        """Convert a slice's loaded state to the kept form. `exactly`: it has the kept dtypes, and is not in torch's format."""
        piece = self._piece(entry)
        assert piece is not None
        if not self._makes_masters:
            return kept_by(self._inner, piece, state)
        has_master = self.has_master(entry.member)
        return as_kept(state, piece, has_master) if has_master or not exactly else moments.floating(state, piece)

    def _keep(self, entry: Entry, state: Mapping[str, Any]) -> None:
        piece = self._piece(entry)
        assert piece is not None
        self._inner.state[piece] = self._placed(entry, self._as_kept(entry, state, exactly=True), piece)

    def _loaded(self) -> None:
        """Call the user's class to update loaded state, as torch's own loading does."""
        self._consolidated = self._state_names = None
        with self._on_slices():
            self._inner.__setstate__({"state": self._inner.state, "param_groups": self._inner.param_groups})

    def _held(self, entry: Entry) -> Mapping[str, Any]:
        piece = self._piece(entry)
        return self._inner.state.get(piece, {}) if piece is not None else {}

    @on_every_rank("optimizer.state_dict()")
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices. load_state_dict() loads them at the same rank, world size and bucket size.

        Never communicates. Pickling the result raises an Error: a file of one rank's slices would look like the whole
        state. A rank that has the whole state (one rank, or after consolidate_state_dict()) returns torch's ordinary
        format. So do the functions of torch.distributed.checkpoint.state_dict, which every rank calls.
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
            made = made if (changed := made_hook(self, made)) is None else changed
        return made

    def own_slices(self) -> dict[str, Any]:
        """Return a state for a file that only this rank reads; load_state_dict() loads it on this rank."""
        return {MARK: self._slices_of_state()}

    def _slices_of_state(self) -> dict[str, Any]:
        groups = self._groups("indices", self._index.__getitem__)
        entries = sorted(set(self._members()), key=lambda each: each.index)
        state = {entry.index: dict(held) for entry in entries if (held := self._held(entry))}
        return {"layout": self._layout(), "groups": groups, "state": state}

    def _layout(self) -> list[Any]:
        group = self._replica.group
        return [group.rank, group.world_size, *self._owner.layout(self._entries)]

    def _groups(self, members: str, number: Callable[[int], int]) -> list[dict[str, Any]]:
        """Return the groups with numbers of parameters, by their ids, under the key `members`."""
        return [
            {**{k: v for k, v in group.items() if k != "params"}, members: [number(id(p)) for p in group["params"]]}
            for group in self.param_groups
        ]

    def _whole_state(self, entry: Entry) -> dict[str, Any]:
        """Return a parameter's whole state, without copies, on a rank that has all of it."""
        piece, like = self._piece(entry), entry.like
        return {
            key: value.as_strided(like.shape, like.stride(), value.storage_offset())
            if isinstance(value, torch.Tensor) and key != "step" and piece is not None and value.shape == piece.shape
            else value
            for key, value in self.portable_state(entry.member, like).items()
        }

    def portable_state(self, parameter: torch.Tensor, like: torch.Tensor) -> Mapping[str, Any]:
        """Return this rank's state of a parameter; blocks of int8 that no other layout can read are decoded, like `like`."""
        entry = self._entry(parameter)
        is_plain = entry.like.is_contiguous() and not is_dtensor(entry.member)
        return self._held(entry) if is_plain else moments.floating(self._held(entry), like)

    @on_every_rank("optimizer.load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state_dict(), or an ordinary whole state that is equal on every rank.

        Raises ValueError for slices of another rank, world size or layout, or groups of other sizes.
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
        for index, state in saved["state"].items():
            piece = self._piece(entry := self._entries[int(index)])
            moments.check_fits(state, 0 if piece is None else piece.numel(), entry.name)
        self._load_groups(saved["groups"], "indices")
        self._inner.state.clear()
        for index, state in saved["state"].items():
            copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
            self._keep(self._entries[int(index)], copies)
        self._loaded()

    def _load_groups(self, groups: list[dict[str, Any]], members: str) -> None:
        check_saved(self._inner, groups)
        given, own = [len(each[members]) for each in groups], [len(each["params"]) for each in self.param_groups]
        if given != own:
            raise ValueError(f"optimizer state: groups of {given} parameters do not fit {own}")
        for group, saved in zip(self.param_groups, groups):
            group.update({k: copy.deepcopy(v) for k, v in saved.items() if k not in ("params", "indices")})

    def _load_whole(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        names = [name for group in groups for name in group["params"]]
        pairs = [
            (e, state_dict["state"][name]) for name, e in zip(names, self._members()) if name in state_dict["state"]
        ]
        wholes = [entry.member if is_dtensor(entry.member) else entry.like for entry, _ in pairs]
        for (entry, state), whole in zip(pairs, wholes):
            moments.check_fits(state, whole.numel(), entry.name)
        self._load_groups(groups, "params")
        self._inner.state.clear()
        for (entry, state), whole in zip(pairs, wholes):
            self._take_state(entry, moments.readable(state, whole), loaded=True)
        self._loaded()

    @on_every_rank("optimizer.consolidate_state_dict()")
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state on rank `to`, as torch's ZeroRedundancyOptimizer does. Collective.

        Its state_dict() then returns torch's ordinary format until the next step. Cost: the state's bytes to every
        rank, one tensor at a time; only rank `to` needs memory for the whole state.
        """
        group = self._replica.group
        count(0, group.world_size - 1, f"a rank in [0, {group.world_size})")("consolidate_state_dict: to", to)
        whole = {}
        for entry in dict.fromkeys(self._members()):
            state = self._gather_state(entry)
            if group.rank == to:
                whole[entry] = state
        self._consolidated = whole if group.rank == to else None

    def full_state_dict(self) -> dict[str, Any]:
        """Return torch's ordinary state_dict of the whole optimizer, on every rank. Collective.

        Cost: the state's bytes to every rank, and as much memory.
        """
        made = self._in_torchs_format(self._gather_state)
        return {**made, "param_groups": copy.deepcopy(made["param_groups"])}

    def _in_torchs_format(self, state_of: Callable[[Entry], dict[str, Any]]) -> dict[str, Any]:
        entries = list(dict.fromkeys(self._members()))
        numbers = {id(entry.member): number for number, entry in enumerate(entries)}
        state = {number: state_of(entry) for number, entry in enumerate(entries)}
        return {
            "state": {number: each for number, each in state.items() if each},
            "param_groups": self._groups("params", numbers.__getitem__),
        }

    def _gather_state(self, entry: Entry) -> dict[str, Any]:
        return self._owner.gather(entry, self._held(entry))

    def _names_of_state(self, parameter: torch.Tensor) -> list[str]:
        """Return the names of a parameter's state. The first call after a change is collective."""
        if self._state_names is None:
            with with_state(self):
                entries = dict.fromkeys(self._members())
                self._state_names = {each: list(self._owner.described(each, self._held(each))) for each in entries}
        return self._state_names[self._entry(parameter)]

    def held_run(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Return [begin, end) of the elements, in memory order, of which this rank keeps the state; None for none."""
        entry = self._entry(parameter)
        return None if self._piece(entry) is None else self.run(entry.index, entry.replica.group.rank)

    def layout_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape and strides of a parameter, released or not. Its values must not be read."""
        return self._entry(parameter).like

    def layouts(self) -> Iterable[torch.Tensor]:
        return (entry.like for entry in self._members())

    def held_state(self, parameter: torch.Tensor) -> tuple[Mapping[str, Any], torch.Tensor | None, int]:
        """Return (state of this rank's slice of a parameter, for others, the slice or None, its first element)."""
        run, piece = self.held_run(parameter), self.piece_of(parameter)
        return {} if piece is None else self.portable_state(parameter, piece), piece, run[0] if run else 0

    def as_held(self, parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of held_run() in the form of the state."""
        like = self.layout_of(parameter)
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset()) if self._owner.is_whole else flat

    def empty_state(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a one-dimensional tensor, where state is kept, for elements of a slice's state that will be loaded."""
        store = getattr(self._inner, "store", None)
        if store is None:
            return torch.empty(numel, dtype=dtype, device="cpu")
        return store.empty(torch.empty(numel, dtype=dtype, device="meta"), dtype)

    def gathered_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's full state. Collective."""
        return self._gather_state(self._entry(parameter))

    def load_held_state(
        self,
        groups: list[dict[str, Any]],
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        *,
        keep_others: bool = False,  # parameters that `states` lacks keep their state
    ) -> None:
        """Load the state of this rank's slices, and groups as in torch's state dicts. Never communicates."""
        self._load_groups(groups, "params")
        if not keep_others:
            self._inner.state.clear()
        for parameter, state in states.items():
            self._keep(self._entry(parameter), state)
        self._loaded()
