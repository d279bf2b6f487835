"""Law: ranks that torchrun starts again meet anew, whatever earlier starts left in the agents' store, and the failure that came first is
the root cause."""

import json
import resource
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from shardwright._engine import CheckpointError, CommError
from shardwright.comm import failures
from shardwright.comm.attempt import attempt_store


class Starts:
    """An agents' store, and starts of ranks as threads with connections of their own."""

    def __init__(self):
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect(self):
        return dist.TCPStore("127.0.0.1", self.server.port, is_master=False, timeout=timedelta(seconds=20))

    def start(self, world_size, *, ranks=None, timeout_s=20.0):
        """Return each rank's value of a key that only this start's ranks write, or its error."""
        found = {}

        def rank_main(rank):
            try:
                store = attempt_store(self.connect(), rank, world_size, timeout_s)
                store.set(f"from {rank}", str(world_size))
                store.wait([f"from {other}" for other in range(world_size)], timedelta(seconds=10))
                found[rank] = store.add("ranks", 1)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in ranks or range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found


def test_each_start_meets_anew_at_any_world_size():
    starts = Starts()
    for world_size in (3, 3, 1, 5, 2):
        found = starts.start(world_size)
        assert sorted(found.values()) == list(range(1, world_size + 1)), found


def test_what_dead_ranks_left_is_no_answer():
    starts = Starts()
    found = starts.start(3, ranks=[1, 2], timeout_s=0.2)  # their rank 0 died before it came
    assert all(isinstance(each, TimeoutError) and "waited 0.2 s for rank 0" in str(each) for each in found.values())
    room = dist.PrefixStore("shardwright/attempts", starts.connect())
    assert room.add("asked", 1) == 3  # a rank that died between two calls
    found = starts.start(3, ranks=[0, 1], timeout_s=0.3)  # rank 2 died
    assert str(found[0]) == "joining: rank 0 of 3 waited 0.3 s for rank 2, which has not come" == str(found[1])
    assert sorted(starts.start(3).values()) == [1, 2, 3]
    assert sorted(starts.start(2).values()) == [1, 2]


def write(folder, monkeypatch, error, name):
    path = folder / name
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "1")
    failures._report(lambda *_: None, type(error), error, None)
    return path


def failure(path, rank):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    return ProcessFailure(rank, 1, 1 if path else -9, str(path or "none"))


def test_a_report_of_another_ranks_death_is_not_the_root_cause(tmp_path, monkeypatch):
    heard = CommError("rank 0 died")
    heard.rank = 0
    report = write(tmp_path, monkeypatch, heard, "heard")
    own = write(tmp_path, monkeypatch, ValueError("bad batch"), "own")
    save = CheckpointError(f"the save of step 3 failed: {failures.PEER_LOST} while the checkpoint was written")
    saved = write(tmp_path, monkeypatch, save, "saved")
    begun = CheckpointError("step 3 could not be saved: CommError: rank 0 died")
    begun.__cause__ = heard
    begun = write(tmp_path, monkeypatch, begun, "begun")
    assert failure(own, 1).timestamp < min(failure(each, 1).timestamp for each in (report, saved, begun))
    assert failure(None, 0).timestamp < failure(report, 1).timestamp  # the killed rank writes none
    assert failure(own, 1).message["message"] == "ValueError: bad batch"
    recorded = json.loads(own.read_text())
    recorded["message"]["message"] = "by torch's record"
    own.write_text(json.dumps(recorded))
    write(tmp_path, monkeypatch, ValueError("bad batch"), "own")
    assert failure(own, 1).message["message"] == "by torch's record"  # kept
    write(tmp_path, monkeypatch, heard, "own")
    assert failure(own, 1).timestamp >= failure(report, 1).timestamp > 0


def test_a_full_disk_leaves_no_error_file_that_an_agent_cannot_read(tmp_path, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        path = write(tmp_path, monkeypatch, ValueError("bad batch"), "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir()) and failure(path, 1).message.startswith("To enable traceback")


def test_options_that_the_launcher_decides_are_refused():
    import shardwright as sw

    with pytest.raises(ValueError, match="init_process_group: world_size comes from the launcher"):
        sw.init_process_group(world_size=3)


def test_doctor_says_what_restarts_need(monkeypatch):
    from shardwright_tools.doctor import command as doctor

    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    said = doctor._ranks_can_restart()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said and "--nnodes MIN:MAX" in said
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert "a store of its own" in doctor._ranks_can_restart()
