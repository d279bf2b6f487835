"""Law: a failure on one rank before a save or restore begins is reported to all ranks at once, and the next call works.
What was saved can be read, and an invalid request is refused before a byte is read.
"""

import collections
import copy
import errno
import json
import os
import shutil
from unittest import mock

import internals
import pytest
import torch
from checkpoint_subjects import Small, assert_same_state, build, state_of, train
from harness import gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_checkpoint_damage_is_seen_by_all import agreed, checksum
from torch.optim.swa_utils import AveragedModel

if PEER != "torch":
    from internals import agreeing, applying, filling, fitting, os_error

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


@on_every_rank(deadline_s=60)
def test_a_directory_that_went_away_is_named_by_all_and_saves_go_on_when_it_is_back(rank, world_size):
    folder = f"{shared_folder(rank)}/runs"
    model, optimizer = build(Small)
    with sw.Checkpointer(folder, model, optimizer, timeout_s=30) as checkpoints:
        if rank == 0:
            os.rename(folder, folder + ".away")
        gather(None)
        assert "cannot be read: No such file" in agreed(checkpoints.restore)
        with pytest.raises(sw.CheckpointError, match="cannot be read: No such file"):
            checkpoints.save(0)
            checkpoints.wait()
        gather(None)
        if rank == 0:
            os.rename(folder + ".away", folder)
        gather(None)
        checkpoints.save(1)
        checkpoints.wait()
        assert checkpoints.restore() == 2


@pytest.mark.parametrize("zero", [None, 2])
@on_every_rank(deadline_s=60)
def test_a_metric_that_is_nan_on_one_rank_fails_the_save_for_all(rank, world_size, zero):
    model, optimizer = build(Small)
    if zero is not None:
        model, optimizer = sw.wrap(model, optimizer, zero=zero)
    culprit = world_size - 1
    with sw.Checkpointer(shared_folder(rank), model, optimizer, keep_best=1, timeout_s=30) as checkpoints:
        if rank == culprit:
            with pytest.raises(ValueError, match="metric must be finite, got nan"):
                checkpoints.save(0, metric=float("nan"))
        else:
            with pytest.raises(sw.CheckpointError, match=f"rank {culprit}: metric must be finite"):
                checkpoints.save(0, metric=1.0)
                checkpoints.wait()
        checkpoints.save(1, metric=2.0)
        checkpoints.wait()
        assert checkpoints.restore() == 2


@on_every_rank(deadline_s=60)
def test_a_reason_that_is_no_text_is_told_to_all(rank, world_size):
    class Position:
        names: str = ""

        def state_dict(self):
            if self.names:
                raise RuntimeError(f"no file {self.names}")
            return {}

        def load_state_dict(self, state):
            pass

    model, optimizer = build(Small)
    position = Position()
    with sw.Checkpointer(shared_folder(rank), model, optimizer, dataloader=position, timeout_s=30) as checkpoints:
        position.names = "of latin-1 \udce9 with a \0" if rank == world_size - 1 else ""
        with pytest.raises(sw.CheckpointError, match="no file of latin-1"):
            checkpoints.save(0)
            checkpoints.wait()
        position.names = ""
        checkpoints.save(1)
        checkpoints.wait()
        assert checkpoints.restore() == 2


@on_every_rank()
def test_sets_of_sets_and_keys_that_are_sets_come_back(rank, world_size):
    model, optimizer = build(Small)
    saved = {"sets": {frozenset({1, 2}), (frozenset({3}), 4)}, "keys": {frozenset({"a"}): 5, (1, frozenset()): 6}}
    found = {}
    folder = shared_folder(rank)
    with sw.Checkpointer(folder, model, optimizer, user_state=dict(saved)) as checkpoints:
        checkpoints.save(0)
    with sw.Checkpointer(folder, model, optimizer, user_state=found) as checkpoints:
        assert checkpoints.restore() == 1
    assert found == saved


@on_every_rank()
def test_a_scheduler_with_milestones_is_whole_again(rank, world_size):
    model, optimizer = build(Small)
    folder = shared_folder(rank)

    def make():
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])

    with sw.Checkpointer(folder, model, optimizer, scheduler=make()) as checkpoints:
        checkpoints.save(0)
    scheduler = make()
    with sw.Checkpointer(folder, model, optimizer, scheduler=scheduler) as checkpoints:
        checkpoints.restore()
    assert scheduler.milestones == collections.Counter([2, 2, 4])
    assert sorted(scheduler.milestones.elements()) == [2, 2, 4]


@on_every_rank()
def test_a_step_whose_folder_no_reader_would_list_is_refused(rank, world_size):
    model, optimizer = build(Small)
    with sw.Checkpointer(shared_folder(rank), model, optimizer) as checkpoints:
        with pytest.raises(ValueError, match="step must be an integer in"):
            checkpoints.save(10**15 - 1)
        checkpoints.save(10**15 - 2)
        assert checkpoints.restore() == 10**15 - 1


def rewrite_header(folder, name, change):
    """Replace the header of a file of less than a block in a folder, with valid checksums."""
    path = f"{folder}/{name}"
    data = open(path, "rb").read()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    data = data[:8] + text.ljust(size) + data[8 + size :]
    open(path, "wb").write(data)
    manifest = json.load(open(f"{folder}/MANIFEST.json"))
    entry = next(e for e in manifest["files"] if e["path"] == name)
    entry["crc32c"] = f"{checksum(data):08x}"
    del manifest["self_crc32c"]
    body = json.dumps(manifest, separators=(",", ":"))[:-1].encode()
    open(f"{folder}/MANIFEST.json", "wb").write(body + b',"self_crc32c":"%08x"}\n' % checksum(body))


@on_every_rank()
def test_a_tensor_that_claims_to_be_a_smaller_complex_one_is_refused(rank, world_size):
    model, optimizer = build(Small)
    folder = shared_folder(rank)
    extra = {"x": torch.zeros(3, 64, dtype=torch.float64), "pairs": torch.zeros(64, 2, dtype=torch.float64)}
    sw.save(f"{folder}/a", model, extra=extra)
    for number, (name, kind) in enumerate((("x", "complex128"), ("pairs", "complex64"), ("x", "complex32"))):
        changed = f"{folder}/{number}"
        if rank == 0:
            shutil.copytree(f"{folder}/a", changed)
            rewrite_header(
                changed, "state.safetensors", lambda h: h["__metadata__"].update({f"complex.extra.{name}": kind})
            )
        gather(None)
        assert f"a {kind}: it cannot be one" in agreed(lambda: sw.load(changed, model))


@on_every_rank()
def test_generators_of_more_gpus_than_there_are_here(rank, world_size):
    from internals import content

    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device: given.append((state, device)))
        states = content.random_state({})
        patch.setattr(content.random, "setstate", lambda state: None)
        patch.setattr(torch, "set_rng_state", lambda state: None)
        content.set_random_state({**states, "numpy": None, "cuda": ["first", "second"]})
    assert given == [("first", 0)]


@on_every_rank()
def test_a_lock_that_fails_is_not_called_another_writer(rank, world_size):
    from internals import os_error, retention

    def refuse(_, path):
        raise os_error(f"'{path}' cannot be locked: {os.strerror(errno.EIO)}", errno.EIO)

    model, optimizer = build(Small)
    folder = shared_folder(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "lock_file", refuse)
        assert "cannot be locked: Input/output error" in agreed(lambda: sw.Checkpointer(folder, model, optimizer))
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        assert checkpoints.restore() == 1


@on_every_rank()
def test_a_lazy_save_is_given_up_if_something_is_loaded_before_it_is_written(rank, world_size):
    model = torch.nn.Linear(1024, 8192 * world_size, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.Checkpointer(
        shared_folder(rank), model, optimizer, snapshot="lazy", bandwidth_bytes_per_s=32 << 20
    ) as checkpoints:
        checkpoints.save(0)
        with torch.no_grad():
            model.weight.zero_()
        assert "'weight' was changed before the optimizer's step" in agreed(checkpoints.wait)
        checkpoints.save(1)
        checkpoints.wait()
        assert checkpoints.restore() == 2


@pytest.mark.parametrize("zero", [None, 2])
@on_every_rank(deadline_s=60)
def test_a_save_that_one_rank_cannot_begin_is_heard_by_all_at_once(rank, world_size, zero):
    model, optimizer = build(Small)
    model.register_buffer("steps", torch.zeros(3))  # whose values ranks compare before they begin
    if zero is not None:
        model, optimizer = sw.wrap(model, optimizer, zero=zero)
    culprit = world_size - 1
    outcomes = []
    with sw.Checkpointer(shared_folder(rank), model, optimizer, timeout_s=30) as checkpoints:
        for step in range(5):
            metric = float("nan") if step == 0 and rank == culprit else 1.0
            try:  # no wait(): the outcome of a save is heard at the next one
                checkpoints.save(step, metric=metric)
                outcomes.append("begun")
            except (sw.CheckpointError, ValueError) as error:
                outcomes.append(str(error))
        checkpoints.wait()
        heard = f"rank {culprit}: metric must be finite, got nan"
        first = ["metric must be finite, got nan" if rank == culprit else heard, "begun"]
        assert outcomes == [*first, "begun", "begun", "begun"]
        assert checkpoints.restore() == 5


@on_every_rank(deadline_s=60)
def test_a_rank_that_cannot_describe_what_it_holds_leaves_no_rank_waiting(rank, world_size):
    from internals import inventory

    def refuse(*_):
        raise MemoryError("no memory to describe the state")

    model, optimizer = sw.wrap(*build(Small), zero=1)
    culprit = world_size - 1
    with sw.Checkpointer(shared_folder(rank), model, optimizer, timeout_s=30) as checkpoints:
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                patch.setattr(inventory, "describe_state", refuse)
            said = agreed(lambda: checkpoints.save(0))
            assert "no memory to describe the state" in said and (f"rank {culprit}: " in said or world_size == 1)
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                patch.setattr(inventory.Content, "entries", refuse)
            assert "no memory to describe the state" in agreed(lambda: checkpoints.save(0))
        checkpoints.save(1)
        with pytest.MonkeyPatch.context() as patch:  # after the agreement: the others hear of it at their next call
            if rank == culprit:
                patch.setattr(inventory.Content, "sources", refuse)
            said = agreed(lambda: checkpoints.save(2) and checkpoints.wait())
            assert "no memory to describe the state" in said and (f"rank {culprit}: " in said or world_size == 1)
        checkpoints.wait()
        assert checkpoints.restore() == 2


@on_every_rank(deadline_s=60)
def test_ranks_that_meet_a_checkpoint_under_two_names_load_it(rank, world_size):
    """Rank 0 looks between the two renames with which a writer replaces the folder, and the other ranks after the
    second.
    """
    folder = shared_folder(rank)
    model, _ = build(Small)
    sw.save(f"{folder}/a", model)
    openings = agreeing._open_together
    for before, after in (("a", "a.replaced"), ("a.replaced", "a")):

        def opened(path, peers, source):
            found = openings(path, peers, source)
            assert os.path.basename(found.path) == before  # noqa: B023
            gather(None)
            if rank == 0:
                os.rename(f"{folder}/{before}", f"{folder}/{after}")  # noqa: B023
            gather(None)
            return found

        with mock.patch.object(agreeing, "_open_together", opened):
            other, _ = build(Small, seed=9)
            sw.load(f"{folder}/a", other)
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    with mock.patch.object(applying, "_fill_model", side_effect=RuntimeError("no more")):
        said = agreed(lambda: sw.load(f"{folder}/a", other))
    assert "was loaded in part" in said


@on_every_rank(deadline_s=60)
def test_what_must_not_be_replaced_or_passed_over_is_named_by_all(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    with sw.Checkpointer(f"{folder}/runs", model, optimizer, timeout_s=30) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        if rank == 0:
            os.mkdir(f"{folder}/runs/step-000002")
            open(f"{folder}/runs/step-000002/precious.txt", "w").close()
        gather(None)
        checkpoints.save(1)
        assert "has no MANIFEST.json: a save replaces only checkpoints" in agreed(checkpoints.wait)
        assert checkpoints.steps() == [1] and checkpoints.latest == 1 and checkpoints.restore(step=1) == 1
        if world_size > 1:
            assert "step is 0 on rank 0 and 1 on rank 1" in agreed(lambda: checkpoints.restore(step=rank))
        assert "no checkpoint of step 3" in agreed(lambda: checkpoints.restore(step=3))
        if rank == 0:
            assert os.listdir(f"{folder}/runs/step-000002") == ["precious.txt"]
            shutil.copytree(f"{folder}/runs/step-000001", f"{folder}/runs/step-000003")
            manifest = f"{folder}/runs/step-000003/MANIFEST.json"
            body = open(manifest, "rb").read().rpartition(b',"self_crc32c"')[0].replace(b'"version":1', b'"version":2')
            open(manifest, "wb").write(body + b',"self_crc32c":"%08x"}\n' % checksum(body))
        gather(None)
        assert "use a newer shardwright" in agreed(checkpoints.restore)
        checkpoints.save(2)
        assert "use a newer shardwright" in agreed(checkpoints.wait)
    refused = f"{folder}/runs/step-000002"
    assert "replaces only checkpoints" in agreed(lambda: sw.save(refused, model, overwrite=True))
    sw.save(f"{folder}/runs/step-000001", model, overwrite=True)
    gather(None)  # rank 0 returns when it has removed what was replaced; the others when the new one is durable
    assert sorted(os.listdir(f"{folder}/runs")) == [".branch", ".lock", "step-000001", "step-000002", "step-000003"]


@on_every_rank(at_least=2, deadline_s=60)
def test_arguments_that_one_rank_alone_gives_are_told_to_all(rank, world_size):
    folder, last = shared_folder(rank), rank == world_size - 1
    model, optimizer = build(Small)

    def told(call, own, others):
        with pytest.raises(
            Exception, match=own if last else f"rank {world_size - 1}: {own}" if others is None else others
        ):
            call()

    differ = f"is .* on rank 0 and .* on rank {world_size - 1}"
    told(lambda: sw.save(f"{folder}/a", model, step=int(last)), differ, differ)
    told(lambda: sw.save(f"{folder}/a", model, max_file_bytes="x" if last else 99), "max_file_bytes must be", None)
    told(lambda: sw.load("a\0" if last else f"{folder}/a", model), "path must have no zero byte", None)
    told(lambda: sw.Checkpointer(folder, model, timeout_s="5" if last else 20), "timeout_s must be", None)
    told(lambda: sw.Checkpointer(folder, model, on_busy="skip" if last else "wait"), differ, differ)
    with sw.Checkpointer(folder, model, optimizer, timeout_s=20) as checkpoints:
        told(lambda: checkpoints.save(0, every=3 if last else 2), differ, differ)
        told(lambda: checkpoints.save(0, every="a" if last else 2), "every must be", None)
        assert checkpoints.save(0)
        told(lambda: checkpoints.save("a" if last else 1), "step must be", None)
        told(
            lambda: checkpoints.restore() if last else checkpoints.save(1),
            *2 * [f"rank 0 saves step 2 while rank {world_size - 1} restores"],
        )
        assert checkpoints.save(1) and checkpoints.restore() == 2


@on_every_rank(at_least=2, deadline_s=60)
def test_whatever_goes_wrong_on_rank_0_is_told_to_all(rank, world_size):
    folder = shared_folder(rank)
    model, _ = build(Small)
    with mock.patch(
        "shardwright.checkpoint.files.why_not_there", side_effect=RecursionError("too deep") if rank == 0 else None
    ):
        assert "cannot be made: too deep" in agreed(lambda: sw.save(f"{folder}/a", model, timeout_s=20))


@on_every_rank(at_least=2, deadline_s=60)
def test_ranks_that_hold_other_values_are_named_before_a_byte_is_written(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    train(model, optimizer, 1, width=24)
    tensors = {"a parameter": next(model.parameters()), "state": next(iter(optimizer.state.values()))["exp_avg"]}
    with sw.Checkpointer(f"{folder}/a", model, optimizer, timeout_s=20) as checkpoints:
        for tensor in tensors.values():
            before = tensor.detach().clone()
            tensor.data += rank
            assert "has other values on rank 1 than on rank 0" in agreed(lambda: checkpoints.save(0))
            assert "has other values on rank 1 than on rank 0" in agreed(
                lambda: sw.save(f"{folder}/b", model, optimizer)
            )
            tensor.data.copy_(before)
        assert checkpoints.save(0) and checkpoints.restore() == 1
    gather(None)
    assert not os.path.exists(f"{folder}/b")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)  # whose ranks may differ by roundings
    next(model.parameters()).data += rank
    with mock.patch("shardwright.checkpoint.samples._logger.warning") as warning:
        sw.save(f"{folder}/c", wrapped, optimizer)
    assert "has other values on rank 1 than on rank 0" in warning.call_args.args[1]


@pytest.mark.parametrize("original", [False, True])
@on_every_rank(at_least=2, deadline_s=60)
def test_flat_parameters_are_refused_by_all(rank, world_size, original):
    from torch.distributed.fsdp import FullyShardedDataParallel

    folder = shared_folder(rank)
    model = FullyShardedDataParallel(torch.nn.Linear(3, 3), use_orig_params=original, device_id=torch.device("cpu"))
    for call in (
        lambda: sw.save(f"{folder}/a", torch.nn.Sequential(model)),
        lambda: sw.Checkpointer(folder, model),
        lambda: sw.load(folder, model),
    ):
        with pytest.raises(ValueError, match=r"is a FullyShardedDataParallel.*fully_shard \(FSDP2\)"):
            call()


@pytest.mark.parametrize("zero", [1, 3])
@on_every_rank(deadline_s=60)
def test_state_that_is_there_no_longer_is_a_new_layout(rank, world_size, zero):
    """The state was rolled back to before a layer was trained, or cleared."""
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = sw.wrap(model, optimizer, zero=zero, bucket_cap_mb=0.001)

    def step():
        model(torch.ones(2, 24)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with sw.Checkpointer(shared_folder(rank), model, optimizer, timeout_s=30) as checkpoints:
        checkpoints.save(0)
        step()
        checkpoints.save(1)
        assert checkpoints.restore(step=1) == 1
        checkpoints.save(2)
        checkpoints.wait()
        step()
        checkpoints.save(3)
        checkpoints.wait()
        optimizer.state.clear()
        checkpoints.save(4)
        checkpoints.wait()
        assert checkpoints.restore() == 5


@on_every_rank(at_least=2, deadline_s=60)
def test_entries_of_one_shape_that_ranks_hold_of_other_parameters_are_not_mixed(rank, world_size):
    folder = shared_folder(rank)
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(4)) for name in "abc"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with sw.Checkpointer(folder, model, optimizer, timeout_s=30) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        held = model["a" if rank < world_size - 1 else "b"]
        optimizer.state[held]["momentum_buffer"] = torch.full((4,), 1.0 + rank // (world_size - 1))
        checkpoints.save(1)
        said = agreed(checkpoints.wait)
        assert f"rank {world_size - 1} would write other files than rank 0" in said
        optimizer.state.clear()
        checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]


@on_every_rank(deadline_s=60)
def test_a_rollback_that_cannot_be_noted_is_one_sentence_and_a_whole_training(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    with sw.Checkpointer(folder, model, optimizer, timeout_s=30) as checkpoints:
        for step in range(2):
            train(model, optimizer, 1, width=24)
            checkpoints.save(step)
        checkpoints.wait()
        gather(None)
        states = [state_of(model, optimizer)]
        if rank == 0:
            os.mkdir(f"{folder}/.branch.new")
        gather(None)
        said = agreed(lambda: checkpoints.restore(step=1))
        assert "step 1 was restored, but later checkpoints could not be noted as abandoned" in said
        states.append(state_of(model, optimizer))
        if rank == 0:
            os.rmdir(f"{folder}/.branch.new")
        gather(None)
        assert checkpoints.restore(step=1) == 1
        assert_same_state(state_of(model, optimizer), states[1])
        assert checkpoints.restore(step=2) == 2
        assert_same_state(state_of(model, optimizer), states[0])
        checkpoints.save(1)
        checkpoints.wait()  # staging is idle from here on: live tensors are read into before the verdict
        train(model, optimizer, 1, width=24)
        live = state_of(model, optimizer)
        wrong = mock.patch.object(
            fitting.Fit, "has_own_compressor", side_effect=KeyError("rank") if rank == world_size - 1 else [True]
        )
        with wrong:
            with pytest.raises((sw.CheckpointError, KeyError), match="rank"):
                checkpoints.restore(step=2)
        assert_same_state(state_of(model, optimizer), live)


@on_every_rank(deadline_s=60)
def test_a_tree_that_names_a_tensor_that_is_not_there_is_refused_before_anything_changes(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    with sw.Checkpointer(folder, model, optimizer, user_state={"x": torch.ones(3)}, timeout_s=30) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        train(model, optimizer, 1, width=24)
        live = state_of(model, optimizer)
        for name in ("state.safetensors", "ranks/all.safetensors"):

            def rename(header):
                header.update({f"{key}z": header.pop(key) for key in [*header] if key != "__metadata__"})

            gather(None)
            if rank == 0:
                shutil.copytree(f"{folder}/step-000001", f"{folder}/step-000002")
                rewrite_header(f"{folder}/step-000002", name, rename)
            gather(None)
            said = agreed(lambda: checkpoints.restore(step=2))
            assert "no file has the tensor '" in said and "in part" not in said, said
            assert_same_state(state_of(model, optimizer), live)
            gather(None)
            if rank == 0:
                shutil.rmtree(f"{folder}/step-000002")
        gather(None)
        assert checkpoints.restore() == 1


@on_every_rank(deadline_s=60)
def test_a_moment_in_which_a_rank_cannot_open_files_costs_no_checkpoint(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    with sw.Checkpointer(folder, model, optimizer, keep_last=1, timeout_s=30) as checkpoints:
        for step in range(2):
            checkpoints.save(step)
        checkpoints.wait()
        gather(None)
        for code in (errno.EMFILE, errno.ESTALE):
            trouble = os_error(f"opening 'model.safetensors' failed: {os.strerror(code)}", code)
            with mock.patch.object(filling.Filler, "verify", side_effect=trouble if rank == world_size - 1 else None):
                said = agreed(checkpoints.restore)
            assert os.strerror(code) in said and (f"rank {world_size - 1}: " in said or world_size == 1)
        assert checkpoints.restore() == 2 and not checkpoints._place.rejected


@on_every_rank(at_least=2, deadline_s=60)
def test_a_part_that_no_wrapper_averages_must_agree(rank, world_size):
    folder = shared_folder(rank)
    torch.manual_seed(0)
    for number, wrap in enumerate((sw.wrap, torch.nn.parallel.DistributedDataParallel)):
        model = torch.nn.Sequential(wrap(torch.nn.Linear(3, 4)), torch.nn.Linear(4, 2))
        model[1].weight.data += rank
        assert "has other values on rank 1 than on rank 0" in agreed(lambda: sw.save(f"{folder}/{number}", model))
        model[1].weight.data -= rank
        whole = torch.nn.Linear(4, 2)
        whole._ddp_params_and_buffers_to_ignore = ["bias"]
        whole = wrap(whole)
        whole.module.bias.data += rank
        assert "has other values on rank 1 than on rank 0" in agreed(lambda: sw.save(f"{folder}/{number}", whole))
        whole.module.bias.requires_grad_(False).data -= rank
        whole.module.weight.data += rank  # averaged, and all that is trained
        with mock.patch("shardwright.checkpoint.samples._logger.warning") as warning:
            sw.save(f"{folder}/{number}", whole)
        assert "has other values on rank 1 than on rank 0" in warning.call_args.args[1]


@pytest.mark.parametrize("zero", [0, 3])
@on_every_rank(deadline_s=60)
def test_copies_and_retired_wrappers_in_user_state_are_saved(rank, world_size, zero):
    """Rank 0 alone encodes them, so a save makes no engine of theirs."""
    folder = shared_folder(rank)
    model = sw.wrap(Small(), zero=zero)
    retired = sw.wrap(Small(), zero=zero)
    kept = sw.wrap(sw.unwrap(retired), zero=1)
    with sw.full_parameters(model):
        state = {"average": AveragedModel(model), "copy": copy.deepcopy(model)}
    state |= {"retired": retired}
    with sw.Checkpointer(folder, model, user_state=state, timeout_s=20) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        copies = [p for each in state.values() for p in each.parameters()]
        expected = [p.detach().clone() for p in copies]
        with torch.no_grad():
            for each in copies:
                each.zero_()
        assert checkpoints.restore() == 1
    assert all(torch.equal(each, value) for each, value in zip(copies, expected, strict=True))
    assert not internals.engine_of(state["copy"]).made and kept is not None
