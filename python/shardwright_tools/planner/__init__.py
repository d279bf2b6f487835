"""`shardwright plan`: what fits, which configuration to run and why, the command that starts it, and how often to save.

| file | content |
|---|---|
| shape.py | a model as counts of elements: from a config.json, an import path or a few numbers |
| memory.py | bytes per rank: the formulas that sw.describe() uses too |
| activations.py | bytes that a forward leaves for the backward |
| machine.py | hosts, ranks, links and peak rates, by name or number |
| choose.py | the table of configurations, the chosen one with its reason, the nearest that does not fit |
| saving.py | interval, number and disk space of checkpoints |
| launch.py | launch files; forms.py: the same configuration as code or YAML of other engines |

Closed formulas: no torch, no GPU, no network and no file but the configuration. Only a module on meta needs torch.
"""
