"""Runs pytest again and again out of a process that has imported torch, for tests that each bring an engine of their own.

    python tests/warm_pytest.py IMPORT...      # modules that every run needs

It reads one line of JSON per run: {"path": folder of the package, "environment": {...}, "arguments": [...], "output": file,
"limit_s": seconds}. It writes pytest's exit code as one line; -1 if the run did not end in time.
"""

import importlib
import json
import os
import signal
import sys
import time


def run(path, environment, arguments, output, limit_s):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ.update(environment)
        sys.path.insert(0, path)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(written, descriptor)
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
