#!/usr/bin/env bash
# %made_by
#
# torchrun on each host of %hostfile, over ssh, in this folder. The first host is the meeting point.
set -euo pipefail
here=$(printf %%q "$PWD")
command=%command
for host in %names; do
    ${SSH:-ssh} "$host" "${command/\{\}/$here}" &
done
status=0
for child in $(jobs -p); do wait "$child" || status=$?; done
exit $status
