/* fake_nccl_files.c - collectives between processes: each rank's part of a group is a file.
 *
 *   <folder>/here.<rank>       the rank has joined
 *   <folder>/<n>.<rank>        its part of group n: its node, call_count, the calls, then the bytes
 *                              that each call reads
 *   <folder>/<kind>.<rank>     the rank has come to its first operation of that kind
 *   <folder>/ends.<rank>       the rank begins to end the communicator
 *   <folder>/gone.<rank>       the rank has ended the communicator
 *
 * A part is written when its group is at the head of its stream, under another name first: readers
 * see all of it or nothing. A rank removes its part of group n when n + 1 has run, since all ranks
 * have read n then. A helper thread takes part in a group that peers have reached while this rank's
 * host is busy elsewhere, as a GPU would.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl.h"

enum { PATH_BYTES = 256 };
static const char MARK[] = "files:";
static clique *joined; /* list of the helper thread's cliques */

static void path_of(const clique *c, const char *name, long number, int rank, char *path)
{
    if (number >= 0)
        snprintf(path, PATH_BYTES, "%s/%ld.%d", c->id.internal + sizeof MARK - 1, number, rank);
    else
        snprintf(path, PATH_BYTES, "%s/%s.%d", c->id.internal + sizeof MARK - 1, name, rank);
}

static bool exists(const clique *c, const char *name, long number, int rank)
{
    char path[PATH_BYTES];
    path_of(c, name, number, rank, path);
    return access(path, F_OK) == 0;
}

static void touch(const clique *c, const char *name)
{
    char path[PATH_BYTES];
    path_of(c, name, -1, c->own_rank, path);
    FILE *file = fopen(path, "wb");
    if (file)
        fclose(file);
}

bool nccl_files_id(sw_nccl_id *id)
{
    const char *folder = getenv("SIM_NCCL_FOLDER");
    if (!folder)
        return false;
    snprintf(id->internal, sizeof id->internal, "%s%s/nccl-XXXXXX", MARK, folder);
    return mkdtemp(id->internal + sizeof MARK - 1) != NULL;
}

bool nccl_files_is_id(const sw_nccl_id *id)
{
    return strncmp(id->internal, MARK, sizeof MARK - 1) == 0;
}

void nccl_files_end(const clique *c)
{
    touch(c, "ends");
}

bool nccl_files_stay(const clique *c)
{
    for (int r = 0; r < c->world_size; ++r)
        if (r != c->own_rank && exists(c, "here", -1, r) && !exists(c, "ends", -1, r))
            return true;
    return false;
}

/* ---- a rank's part ---- */

static void post(const nccl_group *g)
{
    const clique *c = g->comm->clique;
    char path[PATH_BYTES], hidden[PATH_BYTES + 8];
    path_of(c, "", c->sequence, c->own_rank, path);
    snprintf(hidden, sizeof hidden, "%s.part", path);
    FILE *file = fopen(hidden, "wb");
    if (!file)
        return;
    fwrite(&g->node, sizeof g->node, 1, file);
    fwrite(&g->call_count, sizeof g->call_count, 1, file);
    fwrite(g->call, sizeof *g->call, (size_t)g->call_count, file);
    for (int i = 0; i < g->call_count; ++i)
        if (g->call[i].kind != RECEIVE)
            fwrite(g->call[i].from, 1, nccl_read_bytes(&g->call[i], c->world_size), file);
    if (fclose(file) == 0)
        rename(hidden, path);
}

/* Load the part of a peer, with its bytes behind the structure. */
static nccl_group *load(const clique *c, int rank, const nccl_group *own)
{
    char path[PATH_BYTES];
    struct stat info;
    path_of(c, "", c->sequence, rank, path);
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &info) != 0)
        abort();
    nccl_group *g = calloc(1, sizeof *g + (size_t)info.st_size);
    unsigned char *bytes = (unsigned char *)(g + 1);
    bool whole =
        fread(&g->node, sizeof g->node, 1, file) == 1 &&
        fread(&g->call_count, sizeof g->call_count, 1, file) == 1 &&
        fread(g->call, sizeof *g->call, (size_t)g->call_count, file) == (size_t)g->call_count;
    size_t rest = whole ? fread(bytes, 1, (size_t)info.st_size, file) : 0;
    (void)rest;
    fclose(file);
    for (int i = 0; i < g->call_count; ++i) {
        g->call[i].from = bytes;
        if (g->call[i].kind != RECEIVE)
            bytes += nccl_read_bytes(&g->call[i], c->world_size);
    }
    g->comm = c->comm[rank];
    g->stream = own->stream; /* reports name it */
    return g;
}

bool nccl_files_ready(nccl_group *g)
{
    clique *c = g->comm->clique;
    if (!c->posted)
        post(g);
    c->posted = true;
    if (c->loaded)
        return true;
    for (int r = 0; r < c->world_size; ++r)
        if (!exists(c, "", c->sequence, r))
            return false;
    for (int r = 0; r < c->world_size; ++r)
        if (r != c->own_rank)
            c->comm[r]->first = load(c, r, g);
    c->loaded = true;
    return true;
}

void nccl_files_next(clique *c)
{
    char path[PATH_BYTES];
    for (int r = 0; r < c->world_size; ++r)
        if (r != c->own_rank) {
            free(c->comm[r]->first);
            c->comm[r]->first = NULL;
        }
    path_of(c, "", c->sequence - 1, c->own_rank, path);
    if (c->sequence > 0)
        unlink(path);
    c->sequence++;
    c->posted = c->loaded = false;
}

/* ---- joining and leaving ---- */

/* Take part in the group that is due if a peer has reached it, as a GPU does without its host. */
static void help_one(clique *c)
{
    const nccl_group *g = c->comm[c->own_rank]->first;
    bool wanted = false;
    for (int r = 0; g && !c->posted && r < c->world_size; ++r)
        wanted |= r != c->own_rank && exists(c, "", c->sequence, r);
    sim_op *op = wanted ? g->stream->first : NULL;
    while (op && op->group != g)
        op = op->next;
    if (op)
        sim_drive(g->stream, op, 0);
}

static void *help(void *unused)
{
    struct timespec nap = {.tv_nsec = 500000};
    (void)unused;
    for (;;) {
        nanosleep(&nap, NULL);
        sim_lock();
        for (clique *c = joined; c; c = c->next_joined)
            help_one(c);
        nap.tv_nsec = joined ? 500000 : 20000000; /* a rank outlives its simulations */
        sim_leave();
    }
    return NULL;
}

void nccl_files_join(clique *c, int rank)
{
    static bool is_helping;
    pthread_t thread;
    c->in_files = true;
    c->own_rank = rank;
    for (int r = 0; r < c->world_size; ++r)
        if (r != rank) {
            c->comm[r] = calloc(1, sizeof *c->comm[r]);
            c->comm[r]->clique = c;
            c->comm[r]->rank = r;
        }
    sim.has_peers = true;
    c->next_joined = joined;
    joined = c;
    touch(c, "here");
    if (!is_helping && pthread_create(&thread, NULL, help, NULL) == 0)
        is_helping = pthread_detach(thread) == 0;
}

static int count_of(const clique *c, const char *name)
{
    int count = 0;
    for (int r = 0; r < c->world_size; ++r)
        count += exists(c, name, -1, r);
    return count;
}

int nccl_files_arrived(clique *c)
{
    return count_of(c, "here");
}

void nccl_files_meet(const clique *c, const char *kind)
{
    touch(c, kind);
}

int nccl_files_met(const clique *c, const char *kind)
{
    return count_of(c, kind);
}

int nccl_files_gone(const clique *c)
{
    for (int r = 0; r < c->world_size; ++r)
        if (r != c->own_rank && exists(c, "gone", -1, r) && !exists(c, "", c->sequence, r))
            return r;
    return -1;
}

void nccl_files_leave(clique *c)
{
    touch(c, "gone");
    clique **at = &joined;
    while (*at && *at != c)
        at = &(*at)->next_joined;
    if (*at)
        *at = c->next_joined;
}
