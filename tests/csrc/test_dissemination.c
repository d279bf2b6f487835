/* test_dissemination.c - the laws of sw_dissemination, for 1 to 80 hosts and 2,048, radix 2, 3, 8:
 *
 *   D1  every host hears every other exactly once, and knows what it passes on before it does
 *   D2  who is told by a hop is who hears in the same hop of its own
 *   D3  hops are in the order of rounds; rounds are ceil(log_radix hosts), at most radix - 1 hops
 *       each
 *   D4  peers are all whom some hop names, each once, never the host itself
 *   D5  no host is named twice as one that tells, nor as one that is told
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "comm/host_map.h"
#include "faults.h"

typedef struct hosts {
    int count, radix;
    sw_dissemination *made; /* of each */
    unsigned char *knows;   /* count x count: how often row heard column */
} hosts;

static int rounds_of(int count, int radix)
{
    int rounds = 0;
    for (long reach = 1; reach < count; reach *= radix)
        ++rounds;
    return rounds;
}

static void spread(hosts *h)
{
    size_t n = (size_t)h->count;
    unsigned char *before = malloc(n * n);
    for (int round = 0; round < h->made[0].rounds; ++round) {
        memcpy(before, h->knows, n * n); /* rounds go side by side */
        for (int to = 0; to < h->count; ++to)
            for (int i = 0; i < h->made[to].hop_count; ++i) {
                const sw_hop *hop = &h->made[to].hops[i];
                for (int k = 0; hop->round == round && k < hop->count; ++k) {
                    size_t of = (size_t)((hop->from + k) % h->count);
                    check(before[(size_t)hop->from * n + of] == 1,
                          "host %d knows %zu before it tells", hop->from, of);
                    h->knows[(size_t)to * n + of]++;
                }
            }
    }
    for (size_t i = 0; i < n * n; ++i)
        check(h->knows[i] == 1, "host %zu hears %zu once, not %d times", i / n, i % n, h->knows[i]);
    free(before);
}

static void check_hops(const hosts *h, int host)
{
    const sw_dissemination *made = &h->made[host];
    int rounds = rounds_of(h->count, h->radix);
    check(made->rounds == rounds && made->hop_count <= (h->radix - 1) * rounds,
          "%d rounds and %d hops for %d hosts", made->rounds, made->hop_count, h->count);
    for (int i = 0; i < made->hop_count; ++i) {
        const sw_hop *hop = &made->hops[i], *theirs = &h->made[hop->to].hops[i];
        check(theirs->from == host && theirs->count == hop->count, "hop %d has two ends", i);
        check(i == 0 || hop->round >= made->hops[i - 1].round, "hops are in order");
        for (int k = 0; k < i; ++k)
            check(made->hops[k].to != hop->to && made->hops[k].from != hop->from,
                  "hosts are named once");
        int named = 0;
        for (int p = 0; p < made->peer_count; ++p)
            named += (made->peers[p] == hop->to) + (made->peers[p] == hop->from);
        check(named == 2, "both ends are peers");
    }
    for (int p = 0; p < made->peer_count; ++p)
        check(made->peers[p] != host && (p == 0 || made->peers[p - 1] < made->peers[p]),
              "peers ascend");
}

static void check_hosts(int count, int radix, bool all)
{
    sw_error err;
    size_t n = (size_t)count;
    hosts h = {.count = count, .radix = radix};
    h.made = calloc(n, sizeof *h.made);
    for (int i = 0; i < count; ++i)
        check(sw_dissemination_init(&h.made[i], i, count, radix, &err) == SW_OK, "made");
    for (int i = 0; i < count; i += all ? 1 : 97)
        check_hops(&h, i);
    h.knows = calloc(n, n);
    for (size_t i = 0; i < n; ++i)
        h.knows[i * n + i] = 1;
    spread(&h);
    free(h.knows);
    for (int i = 0; i < count; ++i)
        sw_dissemination_fini(&h.made[i]);
    free(h.made);
}

static void fails_without_memory(void)
{
    sw_error err;
    sw_dissemination made;
    for (int turn = 1; turn <= 2; ++turn) {
        faults_arm(turn);
        sw_status status = sw_dissemination_init(&made, 3, 20, 8, &err);
        faults_arm(0);
        check(status == SW_E_MEMORY, "no memory is an error: %d", (int)status);
    }
}

int main(void)
{
    static const int radixes[] = {2, 3, SW_DISSEMINATION_RADIX};
    for (int count = 1; count <= 80; ++count)
        for (int i = 0; i < 3; ++i)
            check_hosts(count, radixes[i], true);
    check_hosts(2048, SW_DISSEMINATION_RADIX, false);
    fails_without_memory();
    return check_result();
}
