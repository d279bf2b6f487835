"""`shardwright gpu-check`: one command for the first quarter of an hour on a GPU.

A body runs in separate processes and yields rows. Each row is on disk before the body continues, so a run that is cut
at its limit keeps its findings, and a GPU that hangs ends one run only.
"""
