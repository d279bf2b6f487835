/* test_checkpoint_crash.c - a save is cut at every call that changes a file system, in every way
 * that calls can be cut.
 *
 * This program defines the calls itself (the linker prefers it over the C library) and counts those
 * of a save that replaces an older checkpoint. At call n: the process dies before it, or after it,
 * or in the middle of a write; or it fails with EIO or ENOSPC; or the power goes: what was not
 * synced is dropped or kept at random, file contents and names alike. The law: the newest valid
 * checkpoint is then the older or the new one, whole; the new one if the save said so; and the next
 * save succeeds and clears what was left. A valid checkpoint with a wrong byte exits with 93. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define CASE_ROWS \
    60 /* two blocks: calls are cut, and their number grows with files, not with bytes */
#include "checkpoint/commit.h"
#include "checkpoint_case.h"
#include "recorded_disk.h"

typedef enum fault {
    FAULT_NONE,
    FAULT_DIE_BEFORE,
    FAULT_DIE_AFTER,
    FAULT_TEAR,
    FAULT_EIO,
    FAULT_ENOSPC,
    FAULT_COUNT
} fault;

enum { DIED = 77 };
enum { POWER_CUTS = 160 }; /* after each call, in the long form: some 10,000 cases in all */

static int exchange_refusal; /* an errno: of a file system that cannot exchange names; 0: it can */
static int trash_refusal;    /* an errno: of renames to a name that ends with ".trash"; 0: none */
static char
    moved_away[128]; /* a folder that another save moves away when it is about to be replaced */
static char foreign[128]; /* a file that somebody makes when a folder is about to be replaced */

/* ---- counting and failing ---- */

static struct {
    fault kind;
    int at, seen;
    int dead_from; /* 0, or the first call from which on the disk takes nothing */
    bool is_armed;
} cut;

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

/* Whether the call may go on; `tear` answers whether it is to stop half way. */
static bool may_go_on(bool *is_last, bool *tear)
{
    bool go_on = true;
    *is_last = *tear = false;
    if (!cut.is_armed)
        return true;
    pthread_mutex_lock(&guard);
    ++cut.seen;
    if (cut.dead_from && cut.seen >= cut.dead_from) {
        errno = EIO;
        go_on = false;
    } else if (cut.seen == cut.at) {
        switch (cut.kind) {
        case FAULT_DIE_BEFORE:
            _exit(DIED);
        case FAULT_DIE_AFTER:
            *is_last = true;
            break;
        case FAULT_TEAR:
            *tear = true;
            break;
        case FAULT_EIO:
            errno = EIO;
            go_on = false;
            break;
        case FAULT_ENOSPC:
            errno = ENOSPC;
            go_on = false;
            break;
        default:
            break;
        }
    }
    pthread_mutex_unlock(&guard);
    return go_on;
}

static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        _exit(96);
    return found;
}

#define REAL(type, name) ((type)(uintptr_t)real(name))
#define GUARDED(failure, call)             \
    do {                                   \
        bool is_last_, tear_;              \
        if (!may_go_on(&is_last_, &tear_)) \
            return failure;                \
        if (tear_)                         \
            _exit(DIED);                   \
        result = (call);                   \
        if (is_last_)                      \
            _exit(DIED);                   \
    } while (0)

int open(const char *path, int flags, ...)
{
    typedef int open_type(const char *, int, ...);
    mode_t mode = 0;
    int result;
    if (flags & O_CREAT) {
        va_list arguments;
        va_start(arguments, flags);
        mode = (mode_t)va_arg(arguments, int);
        va_end(arguments);
        GUARDED(-1, REAL(open_type *, "open")(path, flags, mode));
        if (result >= 0)
            record(OP_LINK, node_of(path, NULL), folder_of(path), false, base_of(path), "");
        return result;
    }
    return REAL(open_type *, "open")(path, flags, mode);
}

int mkdir(const char *path, mode_t mode)
{
    typedef int mkdir_type(const char *, mode_t);
    int result;
    GUARDED(-1, REAL(mkdir_type *, "mkdir")(path, mode));
    if (result == 0)
        record(OP_LINK, node_of(path, NULL), folder_of(path), true, base_of(path), "");
    return result;
}

int fallocate(int fd, int mode, off_t offset, off_t size)
{
    typedef int fallocate_type(int, int, off_t, off_t);
    int result;
    bool is_folder;
    GUARDED(-1, REAL(fallocate_type *, "fallocate")(fd, mode, offset, size));
    op *made = result == 0 ? record(OP_SIZE, node_of_fd(fd, &is_folder), 0, false, "", "") : NULL;
    if (made)
        made->size = (uint64_t)size;
    return result;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    typedef ssize_t pwritev_type(int, const struct iovec *, int, off_t);
    bool is_last, tear, is_folder;
    if (!may_go_on(&is_last, &tear))
        return -1;
    if (tear) {
        struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
        (void)!REAL(pwritev_type *, "pwritev")(fd, &half, 1, offset);
        _exit(DIED);
    }
    ssize_t result = REAL(pwritev_type *, "pwritev")(fd, parts, count, offset);
    if (is_last)
        _exit(DIED);
    uint64_t at = (uint64_t)offset;
    for (int i = 0; i < count && result > 0; ++i) {
        op *made = record(OP_WRITE, node_of_fd(fd, &is_folder), 0, false, "", "");
        if (made) {
            made->offset = at;
            made->size = parts[i].iov_len;
            made->data = malloc(parts[i].iov_len + 1);
            memcpy(made->data, parts[i].iov_base, parts[i].iov_len);
        }
        at += parts[i].iov_len;
    }
    return result;
}

int fsync(int fd)
{
    typedef int fsync_type(int);
    int result;
    bool is_folder = false;
    GUARDED(-1, REAL(fsync_type *, "fsync")(fd));
    if (result == 0)
        record(OP_SYNC, node_of_fd(fd, &is_folder), 0, is_folder, "", "");
    return result;
}

int close(int fd)
{
    typedef int close_type(int);
    int result;
    GUARDED((REAL(close_type *, "close")(fd), errno = EIO, -1), REAL(close_type *, "close")(fd));
    return result;
}

/* Somebody is quicker than the save. */
static void make_foreign(void)
{
    FILE *file = *foreign ? fopen(foreign, "wb") : NULL;
    foreign[0] = '\0';
    if (file)
        fclose(file);
}

/* As another save does on a file system that cannot exchange names. */
static void move_away(void)
{
    char replaced[sizeof moved_away + 16];
    snprintf(replaced, sizeof replaced, "%s.replaced", moved_away);
    if (*moved_away && renameat(AT_FDCWD, moved_away, AT_FDCWD, replaced) != 0)
        _exit(96);
    moved_away[0] = '\0';
}

int rename(const char *from, const char *to)
{
    typedef int rename_type(const char *, const char *);
    int result;
    bool is_folder = false;
    ino_t number = node_of(from, &is_folder);
    if (strcmp(base_of(from), "step-000001") == 0)
        make_foreign();
    if (trash_refusal && strlen(to) > 6 && strcmp(to + strlen(to) - 6, ".trash") == 0) {
        errno = trash_refusal;
        return -1;
    }
    GUARDED(-1, REAL(rename_type *, "rename")(from, to));
    if (result == 0)
        record(OP_RENAME, number, folder_of(to), is_folder, base_of(from), base_of(to));
    return result;
}

int unlink(const char *path)
{
    typedef int unlink_type(const char *);
    int result;
    GUARDED(-1, REAL(unlink_type *, "unlink")(path));
    if (result == 0)
        record(OP_UNLINK, 0, folder_of(path), false, base_of(path), "");
    return result;
}

int unlinkat(int folder, const char *path, int flags)
{
    typedef int unlinkat_type(int, const char *, int);
    int result;
    bool is_folder;
    GUARDED(-1, REAL(unlinkat_type *, "unlinkat")(folder, path, flags));
    if (result == 0)
        record(OP_UNLINK, 0, folder == AT_FDCWD ? folder_of(path) : node_of_fd(folder, &is_folder),
               false, base_of(path), "");
    return result;
}

long syscall(long number, ...)
{
    typedef long syscall_type(long, ...);
    long a[6];
    long result;
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; ++i)
        a[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number != SYS_renameat2)
        return REAL(syscall_type *, "syscall")(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (exchange_refusal) {
        move_away();
        errno = exchange_refusal;
        return -1;
    }
    make_foreign();
    GUARDED(-1, REAL(syscall_type *, "syscall")(number, a[0], a[1], a[2], a[3], a[4]));
    if (result == 0)
        record(OP_EXCHANGE, 0, folder_of((const char *)(uintptr_t)a[1]), true,
               base_of((const char *)(uintptr_t)a[1]), base_of((const char *)(uintptr_t)a[3]));
    return result;
}

/* ---- dying and failing ---- */

/* Sanitizers make a fork slow; the thread sanitizer has none after threads. They look at one pass
 * of each kind. */
#if defined(__SANITIZE_THREAD__)
enum { IS_SLOW = 1, CAN_FORK = 0 };
#elif defined(__SANITIZE_ADDRESS__)
enum { IS_SLOW = 1, CAN_FORK = 1 };
#else
enum { IS_SLOW = 0, CAN_FORK = 1 };
#endif

static char directory[64];
static int cases;
static uint64_t saves;
static char nonce[32];       /* of the last save */
static const char *replaces; /* of the next saves */

static sw_status save_step(int step, const char *const *stale, size_t stale_count,
                           const char *const *retired, size_t retired_count, int world_size,
                           sw_error *err)
{
    snprintf(nonce, sizeof nonce, "p%dn%llu", (int)getpid(), (unsigned long long)++saves);
    case_rank settings = {.world_size = world_size,
                          .step = step,
                          .directory = directory,
                          .number = 1,
                          .nonce = nonce,
                          .replaces = replaces,
                          .stale = stale,
                          .stale_count = stale_count,
                          .retired = retired,
                          .retired_count = retired_count,
                          .thread_count = 1,
                          .is_direct = true};
    return case_save_together(settings, err);
}

/* A folder's files under a second name: a save never writes into a file that is there, so what
 * shares it stays as it is. */
static void link_tree(const char *from, const char *to)
{
    DIR *stream = opendir(from);
    bool is_folder = false, done = stream && mkdir(to, 0777) == 0;
    for (struct dirent *found; done && (found = readdir(stream));) {
        char old[SW_PATH_BYTES], new[SW_PATH_BYTES];
        if (strcmp(found->d_name, ".") == 0 || strcmp(found->d_name, "..") == 0)
            continue;
        snprintf(old, sizeof old, "%s/%s", from, found->d_name);
        snprintf(new, sizeof new, "%s/%s", to, found->d_name);
        done = node_of(old, &is_folder) != 0;
        if (is_folder)
            link_tree(old, new);
        else
            done = done && link(old, new) == 0;
    }
    if (!done)
        exit(97);
    closedir(stream);
}

/* A directory with the checkpoint of step 1 and nothing else, which is saved once. */
static void fresh_directory(void)
{
    static char kept[80];
    sw_error err;
    case_clear(directory);
    if (!kept[0]) {
        mkdir(directory, 0777);
        if (save_step(1, NULL, 0, NULL, 0, 1, &err) != SW_OK) {
            printf("the first save: %s\n", err.message);
            exit(97);
        }
        snprintf(kept, sizeof kept, "%s.kept", directory);
        case_clear(kept);
        if (rename(directory, kept) != 0)
            exit(97);
    }
    link_tree(kept, directory);
}

static void die_badly(const char *what, fault kind, int at, int newest, const char *detail)
{
    printf("FAILED: %s: fault %d at call %d: newest is step %d; %s\n", what, (int)kind, at, newest,
           detail);
    exit(1);
}

/* In a child: the save of `step` under the fault. 0: it said "saved"; 1: it said an error. */
static int run_cut(fault kind, int at, int step, int world_size)
{
    char old[96];
    const char *retired[1] = {old};
    sw_error err = {0};
    snprintf(old, sizeof old, "%s/step-%06d", directory, 1);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        cut.kind = kind;
        cut.at = at;
        cut.is_armed = true;
        sw_status status = save_step(step, NULL, 0, retired, step != 1, world_size, &err);
        cut.is_armed = false;
        _exit(status == SW_OK ? (cut.seen < at ? 2 : 0) : 1);
    }
    int state;
    waitpid(child, &state, 0);
    if (!WIFEXITED(state) || WEXITSTATUS(state) > DIED)
        die_badly("the child broke", kind, at, 0,
                  WIFEXITED(state) ? "it found a wrong byte or differing ranks" : "a signal");
    return WEXITSTATUS(state);
}

static void cut_every_call(fault kind, int step, int world_size)
{
    static char left[CASE_NAMES_MAX][SW_PATH_BYTES];
    /* The quick form dies and fails at every call; calls that are torn or find no space it takes in
     * turn, kind by kind. */
    int stride = getenv("SW_TEST_LONG") || kind <= FAULT_DIE_AFTER || kind == FAULT_EIO ? 1 : 2;
    int said = 0;
    for (int at = 1 + (int)kind % stride; said != 2;
         at += stride) { /* 2: the save has fewer calls */
        size_t left_count = 0;
        sw_error err = {0};
        fresh_directory();
        said = run_cut(kind, at, step, world_size);
        int newest = case_newest(directory, left, &left_count);
        if (newest != 1 && newest != step)
            die_badly("neither the old nor the new checkpoint", kind, at, newest, "");
        if ((said == 0 || said == 2) && newest != step)
            die_badly("it was said to be saved", kind, at, newest, "");
        if (exchange_refusal) { /* the same folder again, whatever lies beside it */
            if (save_step(step, NULL, 0, NULL, 0, world_size, &err) != SW_OK)
                die_badly("the same save after it", kind, at, newest, err.message);
            newest = case_newest(directory, left, &left_count);
            if (newest != step)
                die_badly("the same save after it", kind, at, newest, "");
        }
        const char *stale[CASE_NAMES_MAX], *replaced[CASE_NAMES_MAX];
        size_t stale_count = 0, replaced_count = 0;
        bool stands;
        for (size_t i = 0; i < left_count; ++i)
            if (case_is_replaced(left[i], &stands))
                replaced[replaced_count++] = left[i];
            else
                stale[stale_count++] = left[i];
        if (save_step(3, stale, stale_count, replaced, replaced_count, world_size, &err) != SW_OK)
            die_badly("the save after it", kind, at, newest, err.message);
        newest = case_newest(directory, left, &left_count);
        if (newest != 3 || left_count != 0)
            die_badly("the save after it", kind, at, newest, left_count ? left[0] : "");
        cases++;
        if (at > 2000)
            die_badly("too many calls", kind, at, newest, "");
    }
}

/* ---- the power cut ---- */

static disk before, after;

enum { DISKS_MAX = POWER_CUTS * OPS_MAX };
static bool survives[OPS_MAX];   /* the changes that a cut leaves */
static uint64_t seen[DISKS_MAX]; /* hashes of the sets of changes that were looked at */
static size_t seen_count;

/* Equal sets of changes make equal disks: each is looked at once. */
static bool is_new_disk(size_t end, bool was_saved)
{
    uint64_t hash = UINT64_C(14695981039346656037) + was_saved;
    for (size_t i = 0; i < end; ++i)
        if (survives[i] && ops[i].kind != OP_SYNC)
            hash = (hash ^ (i + 1)) * UINT64_C(1099511628211);
    for (size_t i = 0; i < seen_count; ++i)
        if (seen[i] == hash)
            return false;
    if (seen_count < DISKS_MAX)
        seen[seen_count++] = hash;
    return true;
}

/* The saved checkpoint is there, and not one of the same step that it has replaced. */
static bool is_last_saved(const char *where, int step)
{
    char folder[SW_PATH_BYTES];
    sw_manifest found = {0};
    snprintf(folder, sizeof folder, "%s/step-%06d", where, step);
    bool is = sw_manifest_read(folder, &found, NULL) == SW_OK && strcmp(found.nonce, nonce) == 0;
    sw_manifest_fini(&found);
    return is;
}

/* The power goes after `end` changes: look at the disk that those make which survive. */
static void look_at_disk(size_t end, bool was_saved, int step)
{
    static char left[CASE_NAMES_MAX][SW_PATH_BYTES];
    char path[96];
    size_t left_count;
    if (!is_new_disk(end, was_saved))
        return;
    copy_disk(&after, &before);
    for (size_t i = 0; i < end; ++i)
        if (survives[i])
            apply(&after, &ops[i]);
    snprintf(path, sizeof path, "%s.cut", directory);
    case_clear(path);
    materialise(&after, before.nodes[0].number, path);
    int newest = case_newest(path, left, &left_count);
    if ((newest != 1 && newest != step) || (was_saved && !is_last_saved(path, step)))
        die_badly(was_saved ? "power cut after the save" : "power cut", FAULT_NONE, (int)end,
                  newest, "");
    case_clear(path);
    cases++;
}

/* mode 0: nothing unsynced survives; 1: all of it; 2: each change by chance; 3: a prefix by chance
 */
static void cut_power(size_t end, int mode, unsigned *seed, bool was_saved, int step)
{
    size_t prefix = (size_t)rand_r(seed) % (end + 1);
    for (size_t i = 0; i < end; ++i)
        survives[i] = is_synced(i, end) || mode == 1 || (mode == 2 && rand_r(seed) % 2) ||
                      (mode == 3 && i < prefix);
    look_at_disk(end, was_saved, step);
}

/* One unsynced change of names is lost, and what came after it is not. */
static void lose_each_rename(size_t end, bool was_saved, int step)
{
    for (size_t i = 0; i < end; ++i)
        survives[i] = true;
    for (size_t i = 0; i < end; ++i)
        if ((ops[i].kind == OP_RENAME || ops[i].kind == OP_EXCHANGE) && !is_synced(i, end)) {
            survives[i] = false;
            look_at_disk(end, was_saved, step);
            survives[i] = true;
        }
}

static void forget_record(void)
{
    for (size_t i = 0; i < op_count; ++i)
        free(ops[i].data);
    op_count = seen_count = 0;
    for (size_t i = 0; i < before.count; ++i)
        free(before.nodes[i].data);
    for (size_t i = 0; i < after.count; ++i)
        free(after.nodes[i].data);
    before.count = after.count = 0;
}

static void cut_power_everywhere(int step, int world_size, int rounds)
{
    char old[96];
    const char *retired[1] = {old};
    sw_error err = {0};
    unsigned seed = 12345;
    snprintf(old, sizeof old, "%s/step-%06d", directory, 1);
    fresh_directory();
    scan(&before, directory);
    is_recording = true;
    if (save_step(step, NULL, 0, retired, step != 1, world_size, &err) != SW_OK)
        die_badly("the recorded save", FAULT_NONE, 0, 0, err.message);
    is_recording = false;
    if (op_count < 20 || op_count == OPS_MAX)
        die_badly("the record", FAULT_NONE, (int)op_count, 0, "is too short or too long");
    for (size_t end = 0; end <= op_count; ++end) {
        for (int round = 0; round < rounds; ++round)
            cut_power(end, round < 3 ? round : 2 + round % 2, &seed, end == op_count, step);
        lose_each_rename(end, end == op_count, step);
    }
    forget_record();
}

/* A save from whose call `at` on the disk takes nothing leaves unsynced changes; the next save of
 * the same folder is cut by the power. Returns false once a save makes fewer calls. */
static bool cut_power_after_dead(int at, int rounds)
{
    sw_error err = {0};
    unsigned seed = 99;
    fresh_directory();
    scan(&before, directory);
    is_recording = true;
    cut.seen = cut.at = 0;
    cut.is_armed = true;
    cut.dead_from = at;
    (void)!save_step(1, NULL, 0, NULL, 0, 1, &err);
    bool has_call = at <= cut.seen;
    cut.is_armed = false;
    cut.dead_from = 0;
    size_t begin = op_count;
    err.message[0] = '\0';
    if (save_step(1, NULL, 0, NULL, 0, 1, &err) != SW_OK)
        die_badly("the save after a dead one", FAULT_EIO, at, 0, err.message);
    is_recording = false;
    for (size_t end = begin; end <= op_count; ++end) {
        for (int round = 0; round < rounds; ++round)
            cut_power(end, round < 3 ? round : 2 + round % 2, &seed, end == op_count, 1);
        lose_each_rename(end, end == op_count, 1);
    }
    forget_record();
    return has_call;
}

/* A file that is put into a folder between the look at it and its replacement is there afterwards,
 * as the checkpoint beside it is; and so it is after a save that has seen it. */
static void keep_foreign(void)
{
    static char left[CASE_NAMES_MAX][SW_PATH_BYTES];
    char file[sizeof foreign];
    size_t left_count = 0;
    snprintf(file, sizeof file, "%s/step-000001/notes", directory);
    for (int look = 0; look < 3; ++look) {
        sw_error err = {0};
        if (look == 0) {
            fresh_directory();
            snprintf(foreign, sizeof foreign, "%s", file);
        } else if (look == 2) {
            unlink(file);
        }
        sw_status status = save_step(1, NULL, 0, NULL, 0, 1, &err);
        bool is_there = access(file, F_OK) == 0;
        if ((status == SW_OK) != (look == 2) || is_there != (look < 2) ||
            (look < 2 && !strstr(err.message, "holds 'notes', which no checkpoint lists")) ||
            case_newest(directory, left, &left_count) != 1 || left_count != 0)
            die_badly("a foreign file in the folder", FAULT_NONE, look, 1, err.message);
        cases++;
    }
}

/* A folder that changes between the look at it and its replacement is left under its name. */
static void keep_other_saves(void)
{
    char folder[sizeof foreign - 16], identity[SW_IDENTITY_BYTES], then[SW_IDENTITY_BYTES];
    sw_error err = {0};
    fresh_directory();
    snprintf(folder, sizeof folder, "%s/step-000001", directory);
    sw_checkpoint_identify(folder, identity);
    replaces = identity;
    if (save_step(1, NULL, 0, NULL, 0, 1, &err) != SW_OK)
        die_badly("a save in place of what it found", FAULT_NONE, 0, 1, err.message);
    sw_checkpoint_identify(folder, then);
    if (!*identity || strcmp(identity, then) == 0)
        die_badly("identities", FAULT_NONE, 0, 1, then);
    for (int look = 0; look < 3; ++look) { /* changed before the look, there after it, and new */
        snprintf(identity, sizeof identity, "%s", look == 0 ? "1:2:other" : look == 1 ? then : "");
        if (look == 2)
            fresh_directory();
        if (look == 1)
            snprintf(foreign, sizeof foreign, "%s/MANIFEST.json", folder);
        sw_status status = save_step(1, NULL, 0, NULL, 0, 1, &err);
        if (status != SW_E_STATE || !strstr(err.message, "was written by another save") ||
            access(folder, F_OK) != 0)
            die_badly("a folder of another save", FAULT_NONE, look, 1, err.message);
        cases++;
    }
    replaces = NULL;
}

/* The exchanged folder is a left-over under any name: the new one is durable. */
static void replace_without_trash(void)
{
    static char left[CASE_NAMES_MAX][SW_PATH_BYTES];
    char folder[128], before_it[SW_IDENTITY_BYTES], after_it[SW_IDENTITY_BYTES];
    size_t left_count;
    sw_error err = {0};
    fresh_directory();
    snprintf(folder, sizeof folder, "%s/step-000001", directory);
    sw_checkpoint_identify(folder, before_it);
    trash_refusal = EIO;
    sw_status status = save_step(1, NULL, 0, NULL, 0, 1, &err);
    trash_refusal = 0;
    sw_checkpoint_identify(folder, after_it);
    if (status != SW_OK || strcmp(before_it, after_it) == 0 ||
        case_newest(directory, left, &left_count) != 1 || left_count != 0)
        die_badly("a name for what was replaced is refused", FAULT_EIO, 0, 1, err.message);
    cases++;
}

/* Another save is between its two renames: what is there now under the replaced name is the only
 * checkpoint, whose name it takes back if it fails. */
static void keep_what_another_save_replaces(void)
{
    char folder[100], replaced[SW_PATH_BYTES];
    int step = 0;
    sw_error err = {0};
    snprintf(folder, sizeof folder, "%s/step-000001", directory);
    if (sw_checkpoint_replaced_name(replaced, folder, &err) != SW_OK)
        exit(97);
    for (int look = 0; look < 2; ++look) { /* before the commit, and right after it */
        fresh_directory();
        snprintf(moved_away, sizeof moved_away, "%s", folder);
        if (look == 0 && save_step(1, NULL, 0, NULL, 0, 1, &err) != SW_E_STATE)
            die_badly("a folder that another save replaces", FAULT_NONE, look, 1, err.message);
        if (look == 1) {
            move_away();
            sw_commit_clean("/dev/shm/there-is-no-such-folder", folder, "nonce");
        }
        if (!case_is_valid(replaced, &step, &err) || step != 1)
            die_badly("what another save replaces", FAULT_NONE, look, step, err.message);
        cases++;
    }
}

int main(void)
{
    bool is_long = getenv("SW_TEST_LONG") != NULL && !IS_SLOW;
    snprintf(directory, sizeof directory, "%s/sw-crash-%d", case_root(), (int)getpid());
    for (int kind = FAULT_DIE_BEFORE; kind < FAULT_COUNT && CAN_FORK; ++kind) {
        if (IS_SLOW && kind != FAULT_DIE_AFTER && kind != FAULT_EIO)
            continue;
        if (is_long || kind != FAULT_DIE_BEFORE) /* else behind the call before */
            cut_every_call((fault)kind, 2, 1);
        if (is_long || (!IS_SLOW && (kind == FAULT_DIE_BEFORE || kind == FAULT_EIO)))
            cut_every_call((fault)kind, 1, 1); /* a folder of the same name is replaced */
        if (is_long || (!IS_SLOW && kind == FAULT_DIE_AFTER))
            cut_every_call((fault)kind, 2, 3);
    }
    for (int i = 0; i < 2; ++i) { /* the same where a folder is replaced in two steps */
        exchange_refusal = i ? ENOSYS : EINVAL;
        for (int kind = FAULT_DIE_BEFORE; kind < FAULT_COUNT && CAN_FORK; ++kind)
            if (is_long || (!IS_SLOW && kind == (i ? FAULT_EIO : FAULT_DIE_AFTER)))
                cut_every_call((fault)kind, 1, 1);
        keep_foreign();
        keep_other_saves();
        keep_what_another_save_replaces();
        exchange_refusal = i ? EOPNOTSUPP : EINVAL;
        cut_power_everywhere(1, 1, is_long ? POWER_CUTS : 4);
    }
    for (int i = 0; i < 2 && !IS_SLOW; ++i) {
        exchange_refusal = i ? 0 : EINVAL;
        for (int at = is_long ? 1 : 3 + i; cut_power_after_dead(at, is_long ? 4 : 2);
             at += is_long ? 1 : 7)
            ;
    }
    exchange_refusal = 0;
    replace_without_trash();
    keep_foreign();
    keep_other_saves();
    cut_power_everywhere(2, 1, is_long ? POWER_CUTS : 4);
    cut_power_everywhere(1, 1, is_long ? POWER_CUTS : 2);
    if (!IS_SLOW)
        cut_power_everywhere(2, 3, is_long ? POWER_CUTS : 2);
    char kept[80];
    snprintf(kept, sizeof kept, "%s.kept", directory);
    case_clear(kept);
    case_clear(directory);
    printf("%d cases\n", cases);
    return 0;
}
