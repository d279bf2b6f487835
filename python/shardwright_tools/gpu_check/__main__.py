"""python -m shardwright.gpu_check"""

from .runner import main

raise SystemExit(main())
