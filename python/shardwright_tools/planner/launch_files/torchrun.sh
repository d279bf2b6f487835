#!/usr/bin/env bash
# %made_by
#
# Run this on each host. MASTER_ADDR is an address of one of them that all reach.
set -euo pipefail
: "${MASTER_ADDR:?an address of one host that all hosts reach}"
%threads
exec %torchrun
