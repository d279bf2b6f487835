"""`shardwright gpu-check`: one command for the first quarter of an hour on a GPU.

| file | content |
|---|---|
| plan.py | the parts: their runs, limits and expected rows |
| runner.py | starts the processes of a run under the part's limit and collects their rows |
| report.py | prints the rows as a table and writes gpu-report.json and gpu-report.html |
| child.py | one process of a run |
| place.py | the GPU interface of the bodies; tests replace it by a simulated GPU |
| correct.py, faults.py, speed.py, train.py | the bodies |

A body runs in separate processes and yields rows. Each row is on disk before the body continues, so a run that is cut
at its limit keeps its findings, and a GPU that hangs ends one run only.
"""
