"""python -m shardwright.gpu_check: `shardwright gpu-check`, of shardwright_tools."""

from importlib import import_module

if __name__ == "__main__":
    raise SystemExit(import_module("shardwright_tools.gpu_check.runner").main())
