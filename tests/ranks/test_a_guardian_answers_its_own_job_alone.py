"""Law: a host's guardian holds images for one job of one user. It answers the job's present start alone, in time or not at
all, and ends with its launcher.
"""

import json
import os
import resource
import select
import shutil
import signal
import socket
import threading
import time
import types
from unittest import mock

import pytest
from harness import Stopwatch
from internals import Image, client, tier
from internals import guardian as guardian_program
from peer import PEER, sw
from test_steps_in_memory_outlive_their_ranks import open_images, said_by, wait_for
from test_strangers_are_kept_out import become, needs_root, stranger

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


def test_a_copied_directory_has_guardians_of_its_own(tmp_path):
    first, copied, moved = (str(tmp_path / name) for name in ("first", "copied", "moved"))
    os.mkdir(first)
    job = tier.job_of(first)
    shutil.copytree(first, copied)
    assert tier.job_of(first) == job
    other = tier.job_of(copied)
    assert other != job and tier.job_of(copied) == other
    os.rename(first, moved)
    assert tier.job_of(moved) == job
    with mock.patch.object(os, "statvfs", return_value=types.SimpleNamespace(f_fsid=1)):
        assert tier.job_of(moved) == job, "after a reboot, too, when a device may have another number"
    (tmp_path / "moved" / tier.JOB).write_text("")
    with said_by("shardwright") as said:
        assert tier.job_of(moved) != job
    assert len(said) == 1 and "memory.json' is damaged" in said[0]


def test_the_name_of_a_job_is_durable(tmp_path):
    done = []

    def noted(name, call):
        return lambda *given: (done.append(name), call(*given))[1]

    with (
        mock.patch.object(os, "fsync", noted("file", os.fsync)),
        mock.patch.object(os, "replace", noted("name", os.replace)),
        mock.patch.object(tier.CheckpointFolder, "sync", noted("folder", tier.CheckpointFolder.sync)),
    ):
        tier.job_of(str(tmp_path))
    assert done == ["file", "name", "folder"]


def test_images_are_of_the_present_start_and_not_of_children():
    name = client.name_of("4" * 32, None)
    old = client.Client.start(name, "old", client.ancestors()[0])
    Image.make(old, "own-0", 1 << 20, 1).close()
    new = client.Client(name, "new")
    image = Image.open(new, "own-0")
    late = client.Client(name, "old")  # a rank of the old start that was stopped before it came here
    for each in (old, late):
        for what in ("drop", "open"):
            with pytest.raises(sw.CheckpointError, match="a later start of this job has come"):
                each.ask(what, "own-0")
        with pytest.raises(sw.CheckpointError, match="a later start of this job has come"):
            Image.make(each, "own-0", 1 << 20, 1)
    child = os.fork()
    if child == 0:
        os._exit(len(open_images()) + (image.fd != -1))
    assert os.waitpid(child, 0)[1] == 0 and len(open_images()) == 3, "two descriptors and a mapping"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        with pytest.raises(sw.CheckpointError, match=rf"this process may open {free} files \(ulimit -n\)"):
            new.ask("open", "own-0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    image.close()
    for each in (old, late, new):
        each.close(goodbye=True)


def test_a_guardian_that_is_stopped_is_not_waited_for():
    """Its late answer is not taken for another one, and no second guardian is tried beside it."""
    launcher = client.ancestors()[0]
    pid = client.Client.start(client.name_of("5" * 32, None), "a", launcher).ask("list")[0]["pid"]
    first = client.Client(client.name_of("5" * 32, None), "a", answer_s=0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(client.Silent, match="this host's guardian does not answer: timed out"):
            first.ask("list")
        begin = Stopwatch()
        with pytest.raises(client.Silent):
            client.Client.start(client.name_of("5" * 32, None), "b", launcher, answer_s=0.2)
        assert begin.seconds() < 3
    finally:
        os.kill(pid, signal.SIGCONT)
    assert first.is_silent and not first.is_alive
    with pytest.raises(sw.CheckpointError, match="does not answer"):
        Image.open(first, "own-0")
    second = client.Client.start(client.name_of("5" * 32, None), "c", launcher)
    assert second.ask("list")[0]["pid"] == pid
    second.close(goodbye=True)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_thread_that_waits_to_ask_receives_no_answer_of_another():
    """Two threads ask a guardian that is stopped. It goes on as the first gives up: its answer is for nobody."""

    class Slow(threading.Semaphore):
        """A lock after whose release the next thread runs on at once."""

        def __exit__(self, *raised):
            os.kill(pid, signal.SIGCONT)
            super().__exit__(*raised)
            time.sleep(0.2)

    def ask(what):
        with pytest.raises(sw.CheckpointError) as caught:
            asked.ask(what, "own-0")
        errors.append(caught.value)

    errors = []
    name, launcher = client.name_of("6" * 32, None), client.ancestors()[0]
    pid = client.Client.start(name, "a", launcher).ask("list")[0]["pid"]
    asked, other = client.Client(name, "a", answer_s=0.3), client.Client(name, "a")
    Image.make(other, "own-0", 1 << 20, 1).close()
    asked._asking = Slow()
    os.kill(pid, signal.SIGSTOP)
    threads = [threading.Thread(target=ask, args=(what,)) for what in ("open", "list")]
    for each in threads:
        each.start()
        time.sleep(0.05)
    for each in threads:
        each.join()
    assert [type(each) for each in errors] == [client.Silent] * 2, errors
    assert "guardian does not answer" in str(errors[1]) and not asked.is_alive
    with other._asking:  # its thread is between its question and the answer, which has come
        other._socket.sendall(b'{"what": "list", "name": ""}')
        assert select.select([other._socket], [], [], 10)[0] and other.is_alive, "an answer is no end"
        other._socket.recv(1 << 16)
    assert other.is_alive and other.ask("list")[0]["pid"] == pid
    other.close(goodbye=True)
    assert not other.is_alive, "a closed connection is no error inside a collective"
    client.Client(name, "b").close(goodbye=True)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def test_an_interrupted_question_ends_the_connection():
    """Its answer comes late, and would be taken for that to the next question."""
    asked = client.Client.start(client.name_of("7" * 32, None), "a", client.ancestors()[0])
    with mock.patch.object(client.socket, "recv_fds", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        asked.ask("list")
    with pytest.raises(client.Silent):
        asked.ask("list")
    assert not asked.is_alive
    client.Client(client.name_of("7" * 32, None), "b").close(goodbye=True)


def test_starts_of_a_guardian_have_one_deadline():
    """The other ranks wait for all of them together, for four times the time of an answer."""
    now = [100.0]

    def runs(*arguments, timeout, **options):
        limits.append(timeout)
        now[0] += timeout * 0.75  # and starts none

    limits = []
    name = client.name_of("8" * 32, None)
    with (
        mock.patch.object(client, "time", types.SimpleNamespace(monotonic=lambda: now[0])),
        mock.patch.object(client.subprocess, "run", runs),
        pytest.raises(sw.CheckpointError, match="this host's guardian does not answer: Connection refused"),
    ):
        client.Client.start(name, "a", client.ancestors()[0], answer_s=4.0)
    assert limits == [8.0, 2.0, 0.5], limits


def asks(say, name):
    """A process of another user connects to the guardian, and asks for an image."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    connection.connect("\0" + name)
    try:
        connection.send(json.dumps({"what": "open", "name": "own-0"}).encode())
        heard = socket.recv_fds(connection, 4096, 1)[:2]
    except OSError as error:
        heard = type(error).__name__
    say.write("begun\n")
    say.write(f"{heard}\n")


def squats(say, name):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(8)
    say.write("begun\n")
    signal.pause()


@needs_root
def test_strangers_neither_read_nor_replace_a_guardian(tmp_path):
    assert become is not None
    job, launcher = "0" * 32, client.ancestors()[0]
    name = client.name_of(job, None)
    with stranger("nobody", squats, name), pytest.raises(sw.CheckpointError, match="a process of user 65534 answers"):
        client.Client.start(name, "a", launcher)
    guardian = client.Client.start(name, "a", launcher)
    guardian.ask("make", "own-0", nbytes=4096, meta={})
    with stranger("nobody", asks, name) as say:
        assert say.readline() in ("(b'', [])\n", "ConnectionResetError\n", "BrokenPipeError\n")
    with open(f"/proc/{guardian.ask('list')[0]['pid']}/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    assert int(fields["VmRSS"].split()[0]) < 15 << 10 and int(fields["Threads"]) == 1
    other = client.Client.start(client.name_of("1" * 32, None), "a", launcher)  # another job of this user
    assert other.ask("list")[0]["names"] == [] and guardian.ask("list")[0]["names"] == ["own-0"]
    for each in (other, guardian):
        each.close(goodbye=True)


def test_a_guardian_ends_with_its_launcher_and_after_its_linger():
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(1)
    pids = []
    for job, launcher, linger_s in (
        ("2", (child, guardian_program.start_of(child)), 60.0),
        ("3", client.ancestors()[0], 0.2),
    ):
        guardian = client.Client.start(client.name_of(job * 32, None), "a", launcher, linger_s)
        pids.append(guardian.ask("list")[0]["pid"])
        guardian.close(goodbye=False)
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    os.kill(child, signal.SIGKILL)  # it is not reaped yet: the guardian ends nevertheless
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    os.waitpid(child, 0)
