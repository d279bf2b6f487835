"""cuda_files.py lies in the folder above; ranks, models and the oracle in those beside."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS, TESTS / "ranks"):
    sys.path.insert(0, str(folder))
