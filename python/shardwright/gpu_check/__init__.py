"""`python -m shardwright.gpu_check`: one command for the first half hour on a GPU.

| file | content |
|---|---|
| plan.py | the parts, the runs of each, their limits and the rows that each must give |
| runner.py | starts the processes of a run under the part's limit and collects their rows |
| report.py | the rows as a table, as gpu-report.json and as gpu-report.html |
| child.py | one process of a run |
| place.py | a GPU as the bodies use it; a test puts a simulated one in its place |
| correct.py, faults.py, speed.py, train.py | the bodies |

A body runs in processes of its own and yields rows. Rows are on disk before the body goes on, so a run that is cut
at its limit loses nothing that it has found, and a GPU that hangs ends one run only.
"""
