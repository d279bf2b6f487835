"""python -m shardwright: the command line, of shardwright_tools."""

from importlib import import_module

if __name__ == "__main__":
    raise SystemExit(import_module("shardwright_tools.cli").main())
