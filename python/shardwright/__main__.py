"""python -m shardwright"""

from .cli import main

raise SystemExit(main())
