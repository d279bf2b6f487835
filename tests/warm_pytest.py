"""Runs pytest again and again out of a process that has imported torch, for tests that each bring an engine of their own.

    python tests/warm_pytest.py IMPORT...      # modules that every run needs

It reads a line of JSON a run, {"path": folder of the package, "environment": {...}, "arguments": [...], "limit_s": seconds}, and writes the
exit code of pytest in a line; -1 if the run had not ended.
"""

import importlib
import json
import os
import signal
import sys
import time


def run(path, environment, arguments, limit_s):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ.update(environment)
        sys.path.insert(0, path)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        code = 70
        try:
            code = int(importlib.import_module("pytest").main(arguments))
        finally:
            os._exit(code)
    until = time.monotonic() + limit_s
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.02)
    if ended[0]:
        return os.waitstatus_to_exitcode(ended[1])
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def main():
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert "shardwright" not in sys.modules
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
