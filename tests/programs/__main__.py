"""python tests/programs [FILE] [--seed N] [--count N]"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "ranks"), str(HERE.parent)]

if __name__ == "__main__":
    from programs.search import main

    sys.exit(main(sys.argv[1:]))
