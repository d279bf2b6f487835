/* test_checkpoint_save.c - ranks as threads save one checkpoint: the same bytes for every world
 * size, form and number of threads; one sentence on every rank where they cannot. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <dlfcn.h>

#include "checkpoint/write.h"
#include "checkpoint_case.h"
#include "platform/clock.h"

static int failed;
static char directory[64];
static atomic_int tally_reads[CASE_HOSTS_MAX]; /* opens to read each host's tallies */

static void check(bool right, const char *what, const char *detail)
{
    if (!right) {
        printf("FAILED: %s: %s\n", what, detail);
        failed++;
    }
}

static void read_model(int step, char **data, size_t *size)
{
    char path[SW_PATH_BYTES];
    sw_error err;
    snprintf(path, sizeof path, "%s/step-%06d/model.safetensors", directory, step);
    if (sw_file_read_whole(path, 1 << 30, data, size, &err) != SW_OK) {
        printf("%s\n", err.message);
        exit(95);
    }
}

static void every_form_writes_the_same_bytes(void)
{
    char *first = NULL;
    size_t first_size = 0;
    int saves = 0;
    for (int world = 1; world <= CASE_WORLD_MAX; ++world)
        for (int form = 0; form < 8; ++form) {
            char nonce[32];
            sw_error err = {0};
            int step = 0;
            char *data = NULL, path[SW_PATH_BYTES];
            size_t size = 0;
            case_clear(directory);
            mkdir(directory, 0777);
            snprintf(nonce, sizeof nonce, "n%d", ++saves);
            case_rank settings = {.world_size = world,
                                  .step = 7,
                                  .directory = directory,
                                  .number = 1,
                                  .nonce = nonce,
                                  .is_direct = form & 1,
                                  .is_lazy = (form & 2) != 0,
                                  .thread_count = form & 4 ? 3 : 1};
            check(case_save_together(settings, &err) == SW_OK, "a save", err.message);
            snprintf(path, sizeof path, "%s/step-000007", directory);
            check(case_is_valid(path, &step, &err) && step == 7, "it is valid", err.message);
            read_model(7, &data, &size);
            if (!first) {
                first = data;
                first_size = size;
                continue;
            }
            check(size == first_size && memcmp(data, first, size) == 0, "same bytes", nonce);
            free(data);
        }
    free(first);
}

static void make_board(char path[128])
{
    static const uint8_t zeros[CASE_HOSTS_MAX * SW_CHANNEL_PAGE_BYTES];
    sw_error err = {0};
    snprintf(path, 128, "%s/.board", directory);
    unlink(path);
    check(sw_file_write_new(path, zeros, sizeof zeros, false, &err) == SW_OK, "a board", "");
}

/* Hosts share a folder, and no memory; a host may have one rank or several. */
static void hosts_save_through_a_file(void)
{
    static const int maps[][CASE_WORLD_MAX] = {
        {0, 1, 2, 3, 4}, {0, 0, 1, 1, 1}, {0, 1, 0, 1, 0}, {0, 1, 1, 2, 0}};
    char path[128], nonce[32], name[SW_PATH_BYTES];
    static char names[CASE_NAMES_MAX][SW_PATH_BYTES];
    size_t left;
    for (size_t m = 0; m < sizeof maps / sizeof *maps; ++m)
        for (int world = 2 + (m > 0); world <= CASE_WORLD_MAX; ++world) {
            sw_error err = {0};
            int step = 0;
            case_clear(directory);
            mkdir(directory, 0777);
            make_board(path);
            snprintf(nonce, sizeof nonce, "f%zux%d", m, world);
            case_rank settings = {.world_size = world,
                                  .step = 7,
                                  .directory = directory,
                                  .number = 1,
                                  .nonce = nonce,
                                  .host_of = maps[m],
                                  .board_path = path,
                                  .thread_count = 2};
            check(case_save_together(settings, &err) == SW_OK, "a save", err.message);
            snprintf(name, sizeof name, "%s/step-000007", directory);
            check(case_is_valid(name, &step, &err) && step == 7, "it is valid", err.message);
            snprintf(name, sizeof name, "%s/step-000007/TALLIES-00000", directory);
            check(access(name, F_OK) != 0 && case_newest(directory, names, &left) == 7 && left == 0,
                  "nothing is left", name);
        }
}

/* The carrier of host 16 merges the tallies of its group, so rank 0 opens one file for the group.
 */
static void the_first_host_of_a_group_merges_its_tallies(void)
{
    enum { HOSTS = SW_CHANNEL_GROUP + 3 };
    int hosts[HOSTS];
    char path[128], name[SW_PATH_BYTES];
    static char names[CASE_NAMES_MAX][SW_PATH_BYTES];
    size_t left;
    int step = 0;
    sw_error err = {0};
    _Static_assert((int)HOSTS <= (int)CASE_HOSTS_MAX, "room for the ranks");
    for (int h = 0; h < HOSTS; ++h)
        hosts[h] = h;
    case_clear(directory);
    mkdir(directory, 0777);
    make_board(path);
    case_rank settings = {.world_size = HOSTS,
                          .step = 7,
                          .directory = directory,
                          .number = 1,
                          .nonce = "g1",
                          .host_of = hosts,
                          .board_path = path,
                          .thread_count = 1};
    for (int h = 0; h < HOSTS; ++h)
        atomic_store(&tally_reads[h], 0);
    check(case_save_together(settings, &err) == SW_OK, "a save", err.message);
    snprintf(name, sizeof name, "%s/step-000007", directory);
    check(case_is_valid(name, &step, &err) && step == 7, "it is valid", err.message);
    check(case_newest(directory, names, &left) == 7 && left == 0, "nothing is left", directory);
    for (int h = 1; h < HOSTS; ++h) {
        int reads = atomic_load(&tally_reads[h]);
        snprintf(name, sizeof name, "%d of host %d", reads, h);
        /* host 16's carrier reads its own, too, and rank 0 what it made of its group's */
        check(reads == (h == SW_CHANNEL_GROUP ? 2 : 1), "reads of tallies", name);
    }
    snprintf(name, sizeof name, "%s/step-000007/TALLIES-00017", directory);
    check(access(name, F_OK) != 0, "merged tallies are removed", name);
}

enum { LATER_US = 30000 };

/* The carrier of host 16 says "written" after the rest of its group, for which it waits. */
static void a_host_that_stalls_is_named_and_not_the_first_of_its_group(void)
{
    enum { HOSTS = SW_CHANNEL_GROUP + 4, STALLED = HOSTS - 2 };
    static uint8_t memory[HOSTS][SW_CHANNEL_PAGE_BYTES] __attribute__((aligned(4096)));
    static const int order[] = {3, STALLED, SW_CHANNEL_GROUP, -1};
    sw_channel channels[HOSTS];
    int hosts[HOSTS];
    char path[128], found[48];
    sw_error err = {0};
    _Static_assert((int)HOSTS <= (int)CASE_HOSTS_MAX, "room for the ranks");
    for (int r = 0; r < HOSTS; ++r)
        hosts[r] = r;
    case_clear(directory);
    mkdir(directory, 0777);
    make_board(path);
    for (int r = 0; r < HOSTS; ++r) {
        uint8_t *pages[HOSTS] = {NULL};
        pages[r] = memory[r];
        check(sw_channel_init(&channels[r], r, HOSTS, pages, hosts, path, &err) == SW_OK,
              "a channel", err.message);
        if (r != STALLED && r != SW_CHANNEL_GROUP && r != 3)
            sw_channel_say_written(&channels[r], 1);
    }
    for (size_t i = 0; i < 4; ++i) {
        usleep(LATER_US);
        int rank = sw_channel_find_unwritten(&channels[0], 1);
        snprintf(found, sizeof found, "%d, not %d", rank, order[i]);
        check(rank == order[i], "the rank that is waited for", found);
        if (order[i] >= 0)
            sw_channel_say_written(&channels[order[i]], 1);
    }
    for (int r = 0; r < HOSTS; ++r)
        sw_channel_fini(&channels[r]);
}

/* Four ranks on two hosts, each with pages of its own. */
typedef struct team {
    uint8_t memory[4][SW_CHANNEL_PAGE_BYTES] __attribute__((aligned(4096)));
    sw_channel channels[4];
} team;

static void make_team(team *t, const char *path)
{
    static const int hosts[4] = {0, 0, 1, 1};
    uint8_t *pages[4];
    sw_error err = {0};
    memset(t, 0, sizeof *t);
    for (int r = 0; r < 4; ++r)
        pages[r] = t->memory[r];
    for (int r = 0; r < 4; ++r)
        check(sw_channel_init(&t->channels[r], r, 4, pages, hosts, path, &err) == SW_OK,
              "a channel", err.message);
}

static void end_team(team *t)
{
    for (int r = 0; r < 4; ++r)
        sw_channel_fini(&t->channels[r]);
}

static void carriers_pass_on_what_is_said(void)
{
    static team t;
    char path[128];
    sw_error err = {0}, verdict = {0};
    case_clear(directory);
    mkdir(directory, 0777);
    make_board(path);
    make_team(&t, path);
    sw_channel *c = t.channels;
    check(sw_channel_is_carrier(&c[0]) && !sw_channel_is_carrier(&c[1]) &&
              sw_channel_is_carrier(&c[2]) && !sw_channel_is_carrier(&c[3]),
          "carriers", "");
    sw_channel_say_open(&c[0], 9);
    check(sw_channel_is_open(&c[1], 9), "its own host sees it at once", "");
    check(!sw_channel_is_open(&c[3], 9), "another not before its carrier", "");
    usleep(LATER_US);
    check(sw_channel_is_open_at_first(&c[2], 9), "the carrier reads it", "");
    check(!sw_channel_is_open(&c[3], 9), "and first makes its host's file", "");
    sw_channel_say_open(&c[2], 9);
    check(sw_channel_is_open(&c[3], 9), "then it says so", "");
    check(sw_channel_take_place(&c[3], 100) == 0 && sw_channel_take_place(&c[2], 24) == 100,
          "places follow each other", "");
    sw_channel_say_written(&c[0], 9);
    sw_channel_say_written(&c[1], 9);
    check(!sw_channel_have_others_written(&c[2], 9), "its carrier waits for a rank", "");
    sw_channel_say_written(&c[3], 9);
    check(sw_channel_have_others_written(&c[2], 9), "and for none", "");
    check(sw_channel_find_unwritten(&c[0], 9) == 2, "a host is missing", "");
    sw_channel_set_tally_bytes(&c[2], 77); /* the carrier has merged */
    sw_channel_say_written(&c[2], 9);
    usleep(LATER_US);
    check(sw_channel_find_unwritten(&c[0], 9) == -1 && sw_channel_tally_bytes(&c[0], 1) == 77,
          "all have written", "");
    sw_channel_say_committing(&c[0], 9);
    usleep(LATER_US);
    check(!sw_channel_is_committing(&c[3], 9) && sw_channel_is_committing(&c[2], 9) &&
              sw_channel_is_committing(&c[3], 9) && sw_channel_is_committing(&c[1], 9) &&
              !sw_channel_is_committing(&c[1], 10),
          "a commit that has begun", "");
    sw_channel_decide(&c[0], 9, &(sw_error){.status = SW_OK});
    usleep(LATER_US);
    check(!sw_channel_is_decided(&c[3], 9, &verdict), "by its carrier alone", "");
    check(sw_channel_is_decided(&c[2], 9, &verdict) && sw_channel_is_decided(&c[3], 9, &verdict) &&
              verdict.status == SW_OK,
          "a verdict", verdict.message);
    /* A rank that is no carrier fails. */
    sw_channel_fail(&c[3], 10, &(sw_error){.status = SW_E_OS, .message = "mine"});
    usleep(LATER_US);
    check(!sw_channel_has_failure(&c[0], 10, &err), "its carrier does not know", "");
    sw_channel_relay(&c[2], 10);
    usleep(LATER_US);
    check(sw_channel_has_failure(&c[0], 10, &err) && strcmp(err.message, "rank 3: mine") == 0,
          "a failure", err.message);
    sw_channel_decide(&c[0], 10, &err);
    /* A carrier that fails is in the save no more: the others of its host look themselves. */
    sw_channel_fail(&c[2], 11, &(sw_error){.status = SW_E_OS, .message = "cannot begin"});
    usleep(LATER_US);
    check(sw_channel_has_failure(&c[0], 11, &err) &&
              strcmp(err.message, "rank 2: cannot begin") == 0,
          "a carrier's failure", err.message);
    sw_channel_decide(&c[0], 11, &err);
    usleep(LATER_US);
    check(sw_channel_is_decided(&c[3], 11, &verdict) && strstr(verdict.message, "cannot begin"),
          "a verdict without the carrier", verdict.message);
    /* A slot that is being written is not read. */
    sw_channel_decide(&c[0], 12, &(sw_error){.status = SW_OK});
    int fd = open(path, O_RDWR);
    check(pwrite(fd, "x", 1, 100) == 1 && close(fd) == 0, "half a slot", "");
    usleep(LATER_US);
    check(!sw_channel_is_decided(&c[2], 12, &verdict), "it is no news", "");
    sw_channel_decide(&c[0], 13, &(sw_error){.status = SW_OK});
    usleep(LATER_US);
    check(sw_channel_is_decided(&c[2], 13, &verdict) && verdict.status == SW_OK, "a whole one is",
          "");
    end_team(&t);
}

static void *bring_back(void *path)
{
    char away[160];
    snprintf(away, sizeof away, "%s.away", (const char *)path);
    usleep(LATER_US);
    if (rename(away, path) != 0)
        exit(96);
    return NULL;
}

/* No later call relays for a rank whose save is over. */
static void a_last_word_that_cannot_be_written_at_once_is_said_again(void)
{
    static team t;
    char path[128], away[160];
    pthread_t thread;
    sw_error err = {0};
    case_clear(directory);
    mkdir(directory, 0777);
    make_board(path);
    make_team(&t, path);
    sw_channel *c = t.channels;
    snprintf(away, sizeof away, "%s.away", path);
    for (int w = 0; w < 2; ++w) { /* a verdict; a carrier that cannot begin */
        if (rename(path, away) != 0 || pthread_create(&thread, NULL, bring_back, path) != 0)
            exit(96);
        if (w == 0)
            sw_channel_decide(&c[0], 14, &(sw_error){.status = SW_OK});
        else
            sw_channel_fail(&c[2], 15, &(sw_error){.status = SW_E_OS, .message = "cannot begin"});
        pthread_join(thread, NULL);
        usleep(LATER_US);
        check(w == 0 ? sw_channel_is_decided(&c[2], 14, &err)
                     : sw_channel_has_failure(&c[0], 15, &err),
              "a last word", w == 0 ? "the verdict" : "a failure");
    }
    end_team(&t);
}

/* Rank 0 may be about to publish it. */
static void a_board_that_is_gone_is_no_reason_to_remove_the_folder(void)
{
    static uint8_t memory[SW_CHANNEL_PAGE_BYTES] __attribute__((aligned(4096)));
    static const int hosts[2] = {0, 1};
    uint8_t *pages[2] = {NULL, memory};
    char partial[192], path[128];
    sw_channel channel;
    sw_saver *saver = NULL;
    sw_plan *plan = NULL;
    case_data data = {0};
    bool is_over = false;
    sw_error err = {0};
    sw_saver_options options = {.thread_count = 1};
    case_clear(directory);
    mkdir(directory, 0777);
    snprintf(path, sizeof path, "%s/step-000007", directory);
    snprintf(partial, sizeof partial, "%s.n.partial", path);
    mkdir(partial, 0777);
    case_fill(&data, 7, 1, 2);
    check(case_plan(2, &plan, &err) == SW_OK, "a plan", err.message);
    check(sw_channel_init(&channel, 1, 2, pages, hosts, "/dev/shm/there-is-no-such-board", &err) ==
              SW_OK,
          "a channel", err.message);
    channel.gone_ns = 1; /* since long ago */
    check(sw_saver_create(&channel, &options, &saver, &err) == SW_OK, "a saver", err.message);
    sw_save_request request = {.folder = path,
                               .nonce = "n",
                               .number = 1,
                               .step = 7,
                               .shared = {plan, data.sources, CASE_TENSORS + 1},
                               .timeout_ns = CASE_DEADLINE_S * INT64_C(1000000000)};
    check(sw_saver_begin(saver, &request, &err) == SW_OK, "begin", err.message);
    sw_status status = SW_OK;
    while (status == SW_OK && !is_over)
        status = sw_saver_wait(saver, 1000000000, &is_over, &err);
    check(status == SW_E_OS && strstr(err.message, "is gone") != NULL, "a sentence", err.message);
    check(access(partial, F_OK) == 0, "rank 1 leaves rank 0's folder alone", partial);
    sw_saver_destroy(saver);
    sw_channel_fini(&channel);
    sw_plan_destroy(plan);
    case_free(&data);
}

/* ---- a commit that takes long ---- */

typedef enum commit_case {
    COMMIT_IS_SLOW,
    COMMIT_AND_CANCEL,
    COMMIT_AND_DEATH,
    COMMIT_CASES
} commit_case;
/* what a rank adds to its deadline before it gives up a verdict (save_agree.c) */
static const int64_t VERDICT_GRACE_NS = INT64_C(10000000000);

/* Rank 1 of 2, whose time for a verdict ends `time_ns` after it began; this thread is rank 0.
 * False: the machine was so busy that the time ended before the commit began, which says nothing.
 */
static bool commit_slowly(commit_case kind, int64_t time_ns, int number)
{
    static uint8_t memory[COMMIT_CASES][2][SW_CHANNEL_PAGE_BYTES] __attribute__((aligned(4096)));
    uint8_t *pages[2] = {memory[kind][0], memory[kind][1]};
    char folder[128], partial[160], path[192];
    sw_channel channels[2];
    sw_saver *saver = NULL;
    sw_plan *plan = NULL;
    case_data data = {0};
    sw_error err = {0}, cancel = {.status = SW_E_INTERRUPTED, .message = "cancelled"};
    sw_saver_options options = {.thread_count = 1};
    int lock = -1;
    bool is_over = false;
    snprintf(folder, sizeof folder, "%s/step-%06d", directory, number);
    memset(memory[kind], 0, sizeof memory[kind]);
    snprintf(partial, sizeof partial, "%s.n.partial", folder);
    snprintf(path, sizeof path, "%s/ranks", partial);
    case_fill(&data, 1, 1, 2);
    check(case_plan(2, &plan, &err) == SW_OK && mkdir(partial, 0777) == 0 &&
              mkdir(path, 0777) == 0 && sw_plan_create_files(plan, partial, &err) == SW_OK,
          "the folder", err.message);
    snprintf(path, sizeof path, "%s/TALLIES-00000", partial);
    check(sw_file_write_new(path, "", 0, false, &err) == SW_OK &&
              sw_save_lock_take(partial, &lock, &err) == SW_OK,
          "the folder", err.message);
    for (int r = 0; r < 2; ++r)
        check(sw_channel_init(&channels[r], r, 2, pages, NULL, NULL, &err) == SW_OK, "a channel",
              err.message);
    check(sw_saver_create(&channels[1], &options, &saver, &err) == SW_OK, "a saver", err.message);
    sw_channel_say_open(&channels[0], 1);
    sw_save_request request = {.folder = folder,
                               .nonce = "n",
                               .number = 1,
                               .step = 1,
                               .shared = {plan, data.sources, CASE_TENSORS + 1},
                               .timeout_ns = time_ns - VERDICT_GRACE_NS};
    int64_t begun_ns = sw_clock_now_ns();
    check(sw_saver_begin(saver, &request, &err) == SW_OK, "begin", err.message);
    sw_channel_say_written(&channels[0], 1);
    while (sw_channel_find_unwritten(&channels[0], 1) >= 0)
        usleep(1000);
    sw_channel_say_committing(&channels[0], 1);
    bool is_in_time = sw_clock_now_ns() - begun_ns < time_ns;
    if (kind != COMMIT_IS_SLOW) {
        usleep(50000);
        sw_saver_cancel(saver, &cancel);
    }
    if (kind == COMMIT_AND_DEATH)
        close(lock);
    do
        usleep(kind == COMMIT_IS_SLOW ? 200000 : 1300000);
    while (sw_clock_now_ns() < begun_ns + time_ns + 200000000); /* long enough to be seen as late */
    if (kind != COMMIT_AND_DEATH)
        sw_channel_decide(&channels[0], 1, &(sw_error){.status = SW_OK});
    sw_status status = SW_OK;
    while (status == SW_OK && !is_over)
        status = sw_saver_wait(saver, 1000000000, &is_over, &err);
    check(!is_in_time || status == (kind == COMMIT_AND_DEATH ? SW_E_INTERRUPTED : SW_OK),
          kind == COMMIT_IS_SLOW      ? "the verdict of a slow commit"
          : kind == COMMIT_AND_CANCEL ? "the verdict of a commit, though cancelled"
                                      : "rank 0's death ends the wait",
          err.message);
    sw_saver_destroy(saver);
    for (int r = 0; r < 2; ++r)
        sw_channel_fini(&channels[r]);
    sw_save_lock_release(partial, kind == COMMIT_AND_DEATH ? &(int){-1} : &lock);
    sw_plan_destroy(plan);
    case_free(&data);
    return is_in_time;
}

static void *commit_in_time(void *argument)
{
    commit_case kind = *(const commit_case *)argument;
    int64_t time_ns = INT64_C(200000000);
    int number = (int)kind + 1;
    while (!commit_slowly(kind, time_ns, number) &&
           time_ns < CASE_DEADLINE_S * INT64_C(1000000000)) {
        time_ns *= 4;
        number += COMMIT_CASES;
    }
    return NULL;
}

static void a_commit_that_has_begun_is_awaited(void)
{
    static const commit_case cases[COMMIT_CASES] = {COMMIT_IS_SLOW, COMMIT_AND_CANCEL,
                                                    COMMIT_AND_DEATH};
    pthread_t threads[COMMIT_CASES];
    case_clear(directory);
    mkdir(directory, 0777);
    for (size_t i = 0; i < CASE_TENSORS; ++i)
        (void)case_bytes(1, i);
    for (int i = 0; i < COMMIT_CASES; ++i)
        if (pthread_create(&threads[i], NULL, commit_in_time, (void *)(uintptr_t)&cases[i]) != 0)
            exit(96);
    for (int i = 0; i < COMMIT_CASES; ++i)
        pthread_join(threads[i], NULL);
}

static void a_missing_range_is_named_on_every_rank(void)
{
    sw_plan *plan = NULL;
    sw_error err = {0};
    sw_channel channel;
    sw_saver *saver = NULL;
    case_data data = {0};
    sw_saver_options options = {.thread_count = 1};
    case_fill(&data, 1, 0, 1);
    data.sources[1].size_bytes -= 1; /* its last byte is elsewhere */
    check(case_plan(1, &plan, &err) == SW_OK &&
              sw_channel_init(&channel, 0, 1, NULL, NULL, NULL, &err) == SW_OK &&
              sw_saver_create(&channel, &options, &saver, &err) == SW_OK,
          "set up", err.message);
    sw_save_request request = {.folder = "/dev/null/x",
                               .nonce = "n",
                               .number = 1,
                               .shared = {plan, data.sources, CASE_TENSORS + 1},
                               .timeout_ns = 1000000000};
    check(sw_saver_begin(saver, &request, &err) == SW_E_STATE, "begin", err.message);
    check(strstr(err.message, "rank 0 does not hold byte 1122799 of tensor number 1") != NULL,
          "sentence", err.message);
    data.sources[1].size_bytes += 1;
    request.shared.plan = NULL;
    check(sw_saver_begin(saver, &request, &err) == SW_E_INVALID &&
              strstr(err.message, "a save needs the plan of what ranks share") != NULL,
          "no plan", err.message);
    request.shared.plan = plan;
    check(sw_saver_begin(saver, &request, &err) == SW_OK, "begins again", err.message);
    bool is_over = false;
    sw_status status = SW_OK;
    while (!is_over && status == SW_OK)
        status = sw_saver_wait(saver, 1000000000, &is_over, &err);
    check(status == SW_E_OS && strstr(err.message, "/dev/null/x.n.partial") != NULL,
          "no folder can be made", err.message);
    check(sw_saver_wait(saver, 0, &is_over, &err) == SW_OK && is_over, "told once", err.message);
    sw_saver_destroy(saver);
    sw_channel_fini(&channel);
    sw_plan_destroy(plan);
    case_free(&data);
}

static void split_ranges_make_the_same_block(void)
{
    sw_plan *plan = NULL;
    sw_error err = {0};
    case_data data = {0};
    case_fill(&data, 7, 0, 1);
    check(case_plan(1, &plan, &err) == SW_OK, "plan", err.message);
    /* Tensor 1 held as four ranges that lie apart in memory, as slices of state would. */
    sw_save_source ranges[CASE_TENSORS + 4];
    uint64_t cuts[5] = {0, 1, 4096 * 100 + 3, 1048576, case_size(1)};
    uint8_t *copies[4];
    ranges[0] = data.sources[0];
    for (int i = 0; i < 4; ++i) {
        uint64_t size = cuts[i + 1] - cuts[i];
        copies[i] = malloc(size);
        memcpy(copies[i], data.bytes[1] + cuts[i], size);
        ranges[1 + i] = (sw_save_source){1, cuts[i], size, copies[i], false};
    }
    for (int i = 2; i <= CASE_TENSORS; ++i)
        ranges[3 + i] = data.sources[i];
    sw_channel channel;
    sw_saver *saver = NULL;
    sw_saver_options options = {.thread_count = 2, .use_direct = true};
    char folder[128];
    bool is_over = false;
    int step = 0;
    case_clear(directory);
    mkdir(directory, 0777);
    snprintf(folder, sizeof folder, "%s/step-000007", directory);
    check(sw_channel_init(&channel, 0, 1, NULL, NULL, NULL, &err) == SW_OK &&
              sw_saver_create(&channel, &options, &saver, &err) == SW_OK,
          "set up", "");
    sw_save_request request = {.folder = folder,
                               .nonce = "n",
                               .number = 1,
                               .step = 7,
                               .shared = {plan, ranges, CASE_TENSORS + 4},
                               .timeout_ns = CASE_DEADLINE_S * INT64_C(1000000000)};
    sw_status status = sw_saver_begin(saver, &request, &err);
    while (!is_over && status == SW_OK)
        status = sw_saver_wait(saver, 1000000000, &is_over, &err);
    check(status == SW_OK && case_is_valid(folder, &step, &err), "a save of ranges", err.message);
    sw_saver_destroy(saver);
    sw_channel_fini(&channel);
    sw_plan_destroy(plan);
    for (int i = 0; i < 4; ++i)
        free(copies[i]);
    case_free(&data);
}

/* Whatever each rank believes, bytes that no rank or two ranks write end the save. */
static void a_hole_and_a_byte_twice_are_named_before_the_commit(void)
{
    static const struct {
        int64_t shift;
        const char *what;
    } wrong[] = {{1, "a hole"}, {-1, "a byte twice"}};
    for (size_t w = 0; w < 2; ++w) {
        static uint8_t memory[2][SW_CHANNEL_PAGE_BYTES] __attribute__((aligned(4096)));
        uint8_t *pages[2] = {memory[0], memory[1]};
        sw_channel channels[2];
        sw_saver *savers[2] = {NULL, NULL};
        sw_plan *plan = NULL;
        case_data data[2] = {0};
        sw_error err = {0};
        sw_saver_options options = {.thread_count = 1};
        char folder[128];
        static char names[CASE_NAMES_MAX][SW_PATH_BYTES];
        size_t left;
        memset(memory, 0, sizeof memory);
        case_clear(directory);
        mkdir(directory, 0777);
        snprintf(folder, sizeof folder, "%s/step-000007", directory);
        check(case_plan(2, &plan, &err) == SW_OK, "plan", err.message);
        for (int r = 0; r < 2; ++r) {
            case_fill(&data[r], 7, r, 2);
            if (r == 1) { /* of tensor 4 */
                data[r].sources[4].begin += (uint64_t)wrong[w].shift;
                data[r].sources[4].size_bytes -= (uint64_t)wrong[w].shift;
            }
            check(sw_channel_init(&channels[r], r, 2, pages, NULL, NULL, &err) == SW_OK &&
                      sw_saver_create(&channels[r], &options, &savers[r], &err) == SW_OK,
                  "set up", err.message);
            sw_save_request request = {.folder = folder,
                                       .nonce = "n",
                                       .number = 1,
                                       .step = 7,
                                       .shared = {plan, data[r].sources, CASE_TENSORS + 1},
                                       .timeout_ns = CASE_DEADLINE_S * INT64_C(1000000000)};
            check(sw_saver_begin(savers[r], &request, &err) == SW_OK, "begin", err.message);
        }
        for (int r = 0; r < 2; ++r) {
            bool is_over = false;
            sw_status status = SW_OK;
            while (!is_over && status == SW_OK)
                status = sw_saver_wait(savers[r], 1000000000, &is_over, &err);
            check(status == SW_E_STATE &&
                      strstr(err.message, "block 1 of 'model.safetensors' some bytes were written "
                                          "by no rank, or by two") != NULL,
                  wrong[w].what, err.message);
            sw_saver_destroy(savers[r]);
            sw_channel_fini(&channels[r]);
            case_free(&data[r]);
        }
        check(case_newest(directory, names, &left) == 0 && left == 0, "nothing is left", directory);
        sw_plan_destroy(plan);
    }
}

static void a_full_disk_is_an_error_before_the_first_byte(void)
{
    struct rlimit before, limit;
    sw_error err = {0};
    int left;
    size_t count;
    static char names[CASE_NAMES_MAX][SW_PATH_BYTES];
    case_clear(directory);
    mkdir(directory, 0777);
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = 1 << 20;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    case_rank settings = {.world_size = 3,
                          .step = 7,
                          .directory = directory,
                          .number = 1,
                          .nonce = "n",
                          .thread_count = 1};
    sw_status status = case_save_together(settings, &err);
    setrlimit(RLIMIT_FSIZE, &before);
    check(status == SW_E_OS && strstr(err.message, "allocating 2334918 bytes") != NULL &&
              strstr(err.message, "File too large") != NULL,
          "one sentence", err.message);
    left = case_newest(directory, names, &count);
    check(left == 0 && count == 0, "nothing is left", directory);
}

static void a_rank_that_does_not_come_is_named_at_the_deadline(void)
{
    static uint8_t memory[2][SW_CHANNEL_PAGE_BYTES] __attribute__((aligned(4096)));
    uint8_t *pages[2] = {memory[0], memory[1]};
    sw_channel channel;
    sw_saver *saver = NULL;
    sw_plan *plan = NULL;
    case_data data = {0};
    sw_error err = {0};
    sw_saver_options options = {.thread_count = 1};
    char folder[128];
    bool is_over = false;
    case_fill(&data, 1, 0, 2);
    case_clear(directory);
    mkdir(directory, 0777);
    snprintf(folder, sizeof folder, "%s/step-000001", directory);
    check(case_plan(2, &plan, &err) == SW_OK &&
              sw_channel_init(&channel, 0, 2, pages, NULL, NULL, &err) == SW_OK &&
              sw_saver_create(&channel, &options, &saver, &err) == SW_OK,
          "set up", err.message);
    sw_save_request request = {.folder = folder,
                               .nonce = "n",
                               .number = 1,
                               .shared = {plan, data.sources, CASE_TENSORS + 1},
                               .timeout_ns = 200000000};
    sw_status status = sw_saver_begin(saver, &request, &err);
    while (!is_over && status == SW_OK)
        status = sw_saver_wait(saver, 1000000000, &is_over, &err);
    check(status == SW_E_TIMEOUT && strstr(err.message, "rank 1 to write its ranges") != NULL,
          "deadline", err.message);
    sw_saver_destroy(saver);
    sw_channel_fini(&channel);
    sw_plan_destroy(plan);
    case_free(&data);
}

/* ---- a network file system's moments ---- */

/* The next `refusals` opens of an existing file of tallies fail with `refusal_code`. */
static _Atomic int refusals;
static _Atomic int refusal_code;

int open(const char *path, int flags, ...)
{
    typedef int open_type(const char *, int, ...);
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list arguments;
        va_start(arguments, flags);
        mode = (mode_t)va_arg(arguments, int);
        va_end(arguments);
    } else if ((flags & O_ACCMODE) == O_RDONLY && strstr(path, "/TALLIES-")) {
        atomic_fetch_add(&tally_reads[atoi(strrchr(path, '-') + 1)], 1);
    }
    if (!(flags & O_CREAT) && strstr(path, "/TALLIES-")) {
        int left = atomic_load(&refusals);
        while (left > 0 && !atomic_compare_exchange_weak(&refusals, &left, left - 1))
            ;
        if (left > 0) {
            errno = refusal_code;
            return -1;
        }
    }
    return ((open_type *)(uintptr_t)dlsym(RTLD_NEXT, "open"))(path, flags, mode);
}

static void transient_errors_are_retried(void)
{
    static const int codes[] = {ENOENT, ESTALE, EIO, EACCES};
    for (size_t i = 0; i < 4; ++i) {
        sw_error err = {0};
        case_clear(directory);
        mkdir(directory, 0777);
        refusals = i < 3 ? 4 : 1; /* rank 1 opens the file to write, then rank 0 to read */
        refusal_code = codes[i];
        case_rank settings = {.world_size = 2,
                              .step = 7,
                              .directory = directory,
                              .number = 1,
                              .nonce = "n",
                              .thread_count = 1};
        sw_status status = case_save_together(settings, &err);
        check(refusals == 0 && status == (i < 3 ? SW_OK : SW_E_OS), strerror(codes[i]),
              err.message);
    }
}

int main(void)
{
    snprintf(directory, sizeof directory, "%s/sw-save-%d", case_root(), (int)getpid());
    every_form_writes_the_same_bytes();
    transient_errors_are_retried();
    a_board_that_is_gone_is_no_reason_to_remove_the_folder();
    hosts_save_through_a_file();
    the_first_host_of_a_group_merges_its_tallies();
    a_host_that_stalls_is_named_and_not_the_first_of_its_group();
    carriers_pass_on_what_is_said();
    a_last_word_that_cannot_be_written_at_once_is_said_again();
    a_commit_that_has_begun_is_awaited();
    a_missing_range_is_named_on_every_rank();
    split_ranges_make_the_same_block();
    a_hole_and_a_byte_twice_are_named_before_the_commit();
    a_full_disk_is_an_error_before_the_first_byte();
    a_rank_that_does_not_come_is_named_at_the_deadline();
    case_clear(directory);
    return failed ? 1 : 0;
}
