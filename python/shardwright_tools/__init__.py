"""Programs around the engine: the command `shardwright`, conversion of checkpoints, the plan, chaos, the check of a GPU.

They import `shardwright`, which never imports them. Nothing here runs in a training step.
"""
