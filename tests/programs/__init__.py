"""Random training programs, each run by the engine on W ranks and by a naive oracle in one process: docs/design/zero.md.

text.py      a program is Python text, of a setup and statements
statements.py, others.py  the statements: of training itself, and of what other code does around a wrapped module
naive.py     the oracle: the package's functions in a few lines each, on ranks that are threads of one process
play.py      runs a program on one rank, or in the oracle, and says how it ended
verdict.py   compares the two
draw.py      hypothesis draws programs, and shrinks those that fail
__main__.py  the command line: `python tests/programs --seed 7 --count 1000`, or a program's file
"""
