/* test_slice_table.c - what host_map.h looks up, against scans of all ranks, over meshes and
 * maps of hosts drawn at random; and that cuts by it hold every element once. Each allocation fails
 * in turn. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "comm/host_map.h"
#include "faults.h"

enum { RANKS_MOST = 48, MESHES = 400 };

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static int random_below(int limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (int)((random_state * 0x2545f4914f6cdd1du >> 32) % (unsigned)limit);
}

typedef struct mesh {
    int world_size, count, replicas;
    int host_of[RANKS_MOST], of_rank[RANKS_MOST], replica_of[RANKS_MOST];
} mesh;

static mesh draw(void)
{
    mesh m = {.count = 1 + random_below(8), .replicas = 1 + random_below(6)};
    int hosts = 0;
    m.world_size = m.count * m.replicas;
    for (int r = 0; r < m.world_size; ++r) {
        int host = random_below(hosts < 7 ? hosts + 1 : hosts);
        m.host_of[r] = host;
        hosts += host == hosts;
        m.of_rank[r] = r % m.count;
        m.replica_of[r] = r / m.count;
    }
    for (int turn = 0; turn < m.world_size; ++turn) { /* any order of ranks is a mesh */
        int a = random_below(m.world_size), b = random_below(m.world_size);
        int of = m.of_rank[a], replica = m.replica_of[a];
        m.of_rank[a] = m.of_rank[b];
        m.replica_of[a] = m.replica_of[b];
        m.of_rank[b] = of;
        m.replica_of[b] = replica;
    }
    return m;
}

static int scan_owner(const mesh *m, int host, int index)
{
    for (int r = 0; r < m->world_size; ++r)
        if (m->host_of[r] == host && m->of_rank[r] == index)
            return r;
    return -1;
}

static int scan_representative(const mesh *m, int host, int number)
{
    for (int index = 0; index < m->count; ++index)
        for (int r = 0; r < m->world_size; ++r)
            if (m->of_rank[r] == index && m->replica_of[r] == index % m->replicas &&
                m->host_of[r] == host && number-- == 0)
                return r;
    return -1;
}

static void check_look_ups(const mesh *m, const sw_slice_table *table, const sw_host_map *map)
{
    bool covered = true;
    int most = 0;
    for (int h = 0; h < map->host_count; ++h) {
        for (int index = 0; index < m->count; ++index) {
            int owner = scan_owner(m, h, index);
            covered &= owner >= 0;
            check(sw_slice_owner(table, map, h, index) == owner, "the owner of slice %d", index);
        }
        for (int number = 0; number <= m->count; ++number) {
            int representative = scan_representative(m, h, number);
            most = representative >= 0 && number >= most ? number + 1 : most;
            check(sw_slice_representative(table, map, h, (size_t)number) == representative,
                  "representative %d", number);
        }
    }
    check(table->is_covered == covered && table->most_represented == most, "what hosts have");
}

/* Every element is in one block of one host. */
static void check_cut(const sw_slice_table *table, const sw_host_map *map, bool by_rank)
{
    enum { NUMEL = 20011 };
    static unsigned char seen[NUMEL];
    sw_cut cut;
    size_t wrong = 0;
    memset(seen, 0, sizeof seen);
    sw_cut_init(&cut, map, NUMEL, 4, 256, by_rank, table);
    for (int h = 0; h < map->host_count; ++h)
        for (size_t block = 0; block < cut.block_count; ++block) {
            int owner;
            size_t begin, numel = sw_cut_block(&cut, map, h, block, &begin, &owner);
            for (size_t i = begin; i < begin + numel; ++i)
                seen[i]++;
        }
    for (size_t i = 0; i < NUMEL; ++i)
        wrong += seen[i] != 1;
    check(wrong == 0, "%zu elements are not in one block", wrong);
}

int main(void)
{
    sw_error err;
    for (int i = 0; i < MESHES; ++i) {
        mesh m = draw();
        const sw_slices slices = {
            .count = m.count, .of_rank = m.of_rank, .replica_of_rank = m.replica_of};
        sw_host_map map;
        sw_slice_table table;
        check(sw_host_map_init(&map, m.host_of, m.world_size, &err) == SW_OK, "a map");
        for (int nth = 1; i == 0 && nth <= 3; ++nth) {
            faults_arm(nth);
            check(sw_slice_table_init(&table, &map, &slices, &err) == SW_E_MEMORY, "no memory");
            faults_arm(0);
        }
        check(sw_slice_table_init(&table, &map, &slices, &err) == SW_OK, "a table");
        check(sw_slice_table_is_of(&table, &map, &slices), "of these");
        check_look_ups(&m, &table, &map);
        check_cut(&table, &map, true);
        check_cut(NULL, &map, true);
        check_cut(NULL, &map, false);
        sw_slice_table_fini(&table);
        if (m.world_size > 1) {
            m.of_rank[0] = m.of_rank[1];
            m.replica_of[0] = m.replica_of[1];
            check(sw_slice_table_init(&table, &map, &slices, &err) == SW_E_INVALID, "one twice");
        }
        sw_host_map_fini(&map);
    }
    return check_result();
}
