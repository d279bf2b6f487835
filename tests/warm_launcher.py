"""A launcher like torchrun for one host, with ranks forked from a process that has imported torch. A restart takes a
tenth of the time.

    python tests/warm_launcher.py WORLD_SIZE MAX_RESTARTS program.py its arguments

Like torchrun's agent it keeps one store over restarts, ends the remaining ranks when one fails, gives them 30 s, and
sets the same variables. On SIGTERM it ends the ranks with SIGTERM.
"""

import os
import runpy
import signal
import sys
import time
import traceback

LOOK_S = 0.01
GRACE_S = 30.0


def run_rank(rank, world_size, attempt, port, words):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="warm", TORCHELASTIC_RESTART_COUNT=str(attempt), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    sys.argv = list(words)
    code = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        import atexit

        try:
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for_one(pids):
    """Return the exit codes of the ranks that have ended."""
    found = {}
    for rank, pid in pids.items():
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            found[rank] = os.waitstatus_to_exitcode(status)
    return found


def end(pids):
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    while pids:
        for rank in wait_for_one(pids):
            del pids[rank]
        if time.monotonic() > until:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def main():
    world_size, restarts, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    import torch
    import torch._dynamo
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = {}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for attempt in range(restarts + 1):
            sys.stdout.flush()
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    run_rank(rank, world_size, attempt, store.port, words)
                pids[rank] = pid
            failed = False
            while pids and not failed:
                for rank, code in wait_for_one(pids).items():
                    del pids[rank]
                    failed = failed or code != 0
                time.sleep(LOOK_S)
            if not failed:
                return 0
            end(pids)
        return 1
    finally:
        end(pids)


if __name__ == "__main__":
    sys.exit(main())
