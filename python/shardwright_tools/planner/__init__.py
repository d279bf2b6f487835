"""`shardwright plan`: what fits, which configuration to run and why, the command that starts it, and how often to save.

Closed formulas: no torch, no GPU, no network and no file but the configuration. Only a module on meta needs torch.
"""
