/* dissemination.c - see the header. */
#include "comm/dissemination.h"

#include <stdlib.h>

static int order(const void *a, const void *b)
{
    int one = *(const int *)a, two = *(const int *)b;
    return (one > two) - (one < two);
}

static void list_peers(sw_dissemination *made)
{
    int count = 0, kept = 0;
    for (int i = 0; i < made->hop_count; ++i) {
        made->peers[count++] = made->hops[i].to;
        made->peers[count++] = made->hops[i].from;
    }
    qsort(made->peers, (size_t)count, sizeof *made->peers, order);
    for (int i = 0; i < count; ++i)
        if (kept == 0 || made->peers[kept - 1] != made->peers[i])
            made->peers[kept++] = made->peers[i];
    made->peer_count = kept;
}

sw_status sw_dissemination_init(sw_dissemination *made, int host, int host_count, int radix,
                                sw_error *err)
{
    *made = (sw_dissemination){.host = host, .host_count = host_count};
    int most = 0;
    for (long step = 1; step < host_count; step *= radix)
        most += radix - 1;
    made->hops = calloc((size_t)most + 1, sizeof *made->hops);
    made->peers = calloc(2 * (size_t)most + 1, sizeof *made->peers);
    if (!made->hops || !made->peers) {
        sw_dissemination_fini(made);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the messages of %d hosts", host_count);
    }
    for (long step = 1; step < host_count; step *= radix, ++made->rounds)
        for (long far = step; far < step * radix && far < host_count; far += step) {
            long left = host_count - far;
            made->hops[made->hop_count++] =
                (sw_hop){.round = made->rounds,
                         .to = (int)((host + host_count - far) % host_count),
                         .from = (int)((host + far) % host_count),
                         .count = (int)(step < left ? step : left)};
        }
    list_peers(made);
    return SW_OK;
}

void sw_dissemination_fini(sw_dissemination *made)
{
    free(made->hops);
    free(made->peers);
    made->hops = NULL;
    made->peers = NULL;
}
