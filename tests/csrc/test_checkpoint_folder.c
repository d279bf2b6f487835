/* test_checkpoint_folder.c - the folders of checkpoints as other programs see them: durable names,
 * what may be removed, LOCK, and a reader while a writer replaces what it looks for. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>

#include <dlfcn.h>

#include "checkpoint/commit.h"
#include "checkpoint/write.h"
#include "checkpoint_case.h"

static int failed;
static char directory[64];

static void check(bool right, const char *what, const char *detail)
{
    if (!right) {
        printf("FAILED: %s: %s\n", what, detail);
        failed++;
    }
}

/* ---- folders that are made ---- */

static char synced[512]; /* their paths, one after the other */

int fsync(int fd)
{
    typedef int fsync_type(int);
    char link[64], path[256];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0 && strlen(synced) + (size_t)length + 2 < sizeof synced) {
        path[length] = '\0';
        strcat(strcat(synced, path), ";");
    }
    return ((fsync_type *)(uintptr_t)dlsym(RTLD_NEXT, "fsync"))(fd);
}

static void each_new_name_on_the_way_to_a_folder_is_durable(void)
{
    char path[96], expected[256];
    sw_error err = {0};
    case_clear(directory);
    snprintf(path, sizeof path, "%s/a/b", directory);
    snprintf(expected, sizeof expected, "%s;%s;%s/a;", case_root(), directory, directory);
    synced[0] = '\0';
    check(sw_folder_make(path, &err) == SW_OK && strcmp(synced, expected) == 0, synced,
          err.message);
    synced[0] = '\0';
    check(sw_folder_make(path, &err) == SW_OK && !*synced, "what is there needs none", synced);
}

/* ---- a folder that cannot be listed to its end ---- */

static int entries_until_error = -1; /* -1: there is none */

struct dirent *readdir(DIR *stream)
{
    typedef struct dirent *readdir_type(DIR *);
    if (entries_until_error == 0) {
        errno = EIO;
        return NULL;
    }
    entries_until_error -= entries_until_error > 0;
    return ((readdir_type *)(uintptr_t)dlsym(RTLD_NEXT, "readdir"))(stream);
}

/* An entry that was not listed may be a user's file. */
static void a_folder_of_which_the_rest_is_unknown_is_not_removable(void)
{
    sw_error err = {0};
    char folder[96];
    case_clear(directory);
    mkdir(directory, 0777);
    case_rank settings = {.world_size = 1,
                          .step = 7,
                          .directory = directory,
                          .number = 1,
                          .nonce = "n",
                          .thread_count = 1};
    check(case_save_together(settings, &err) == SW_OK, "a save", err.message);
    snprintf(folder, sizeof folder, "%s/step-000007", directory);
    check(sw_checkpoint_check_removable(folder, &err) == SW_OK, "a checkpoint", err.message);
    for (int listed = 0; listed < 3; ++listed) {
        entries_until_error = listed;
        sw_status status = sw_checkpoint_check_removable(folder, &err);
        entries_until_error = -1;
        check(status == SW_E_OS && err.detail == EIO, "a listing that fails", err.message);
    }
}

/* ---- LOCK ---- */

static char locked_folder[96]; /* looked at before a lock is taken; "": not */
static sw_save_life seen_before_the_lock;

int fcntl(int fd, int command, ...)
{
    typedef int fcntl_type(int, int, ...);
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (command == F_OFD_SETLK && *locked_folder) {
        char folder[sizeof locked_folder];
        memcpy(folder, locked_folder, sizeof folder);
        *locked_folder = '\0';
        seen_before_the_lock = sw_save_lock_look(folder);
    }
    return ((fcntl_type *)(uintptr_t)dlsym(RTLD_NEXT, "fcntl"))(fd, command, argument);
}

/* A process that looks between the creation of LOCK and its lock must not take the save for dead,
 * nor take the lock away from it. */
static void a_save_that_lives_is_never_taken_for_dead(void)
{
    int fd = -1;
    char folder[sizeof locked_folder];
    sw_error err = {0};
    case_clear(directory);
    mkdir(directory, 0777);
    snprintf(folder, sizeof folder, "%s", directory);
    memcpy(locked_folder, folder, sizeof folder);
    check(sw_save_lock_take(folder, &fd, &err) == SW_OK, "LOCK", err.message);
    check(seen_before_the_lock == SW_SAVE_UNKNOWN, "it has no name before it is locked", folder);
    check(sw_save_lock_look(folder) == SW_SAVE_ALIVE, "it is locked", folder);
    check(rename(directory, strcat(folder, ".moved")) == 0, "the folder's new name", folder);
    check(sw_save_lock_look(folder) == SW_SAVE_ALIVE, "under its new name, too", folder);
    close(fd);
    check(sw_save_lock_look(folder) == SW_SAVE_DEAD, "a process that has ended", folder);
    fd = -1;
    case_clear(folder);
    mkdir(folder, 0777);
    check(sw_save_lock_take(folder, &fd, &err) == SW_OK, "LOCK", err.message);
    sw_save_lock_release(folder, &fd);
    check(fd == -1 && rmdir(folder) == 0, "nothing is left of it", folder);
}

/* ---- a reader, while a writer replaces what it looks for ---- */

enum { WRITER_STEPS = 3, LOOKED_AT_MAX = 9 };

static bool is_replacing;
static int looked_at, goes_on_at[WRITER_STEPS]; /* after so many looks of the reader */
static const char *const writer_steps[WRITER_STEPS][2] = {
    {"found", "found.replaced"}, {"new", "found"}, {"found.replaced", "gone"}};

static void move(const char *from, const char *to)
{
    char paths[2][SW_PATH_BYTES];
    snprintf(paths[0], SW_PATH_BYTES, "%s/%s", directory, from);
    snprintf(paths[1], SW_PATH_BYTES, "%s/%s", directory, to);
    if (rename(paths[0], paths[1]) != 0)
        exit(96);
}

int lstat(const char *restrict path, struct stat *restrict info)
{
    int result = fstatat(AT_FDCWD, path, info, AT_SYMLINK_NOFOLLOW), code = errno;
    for (int i = 0; is_replacing && i < WRITER_STEPS; ++i)
        if (goes_on_at[i] == looked_at)
            move(writer_steps[i][0], writer_steps[i][1]);
    looked_at += is_replacing;
    errno = code;
    return result;
}

static void check_found(const char *name, const char *what)
{
    char path[SW_PATH_BYTES], found[SW_PATH_BYTES];
    sw_manifest manifest = {0};
    sw_error err = {0};
    snprintf(path, sizeof path, "%s/%s", directory, name);
    is_replacing = true;
    looked_at = 0;
    sw_status status = sw_checkpoint_find(path, found, &manifest, &err);
    is_replacing = false;
    check(status == SW_OK && (manifest.step == 1 || manifest.step == 2), what, err.message);
    sw_manifest_fini(&manifest);
}

/* Whenever the writer takes its steps, the reader finds the old checkpoint or the new one. */
static void what_is_replaced_is_found_all_the_time(void)
{
    char what[96];
    case_clear(directory);
    mkdir(directory, 0777);
    for (int step = 1; step <= 2; ++step) {
        sw_error err = {0};
        case_rank settings = {.world_size = 1,
                              .step = step,
                              .directory = directory,
                              .number = 1,
                              .nonce = step == 1 ? "old" : "new",
                              .thread_count = 1};
        check(case_save_together(settings, &err) == SW_OK, "a save", err.message);
    }
    move("step-000001", "found");
    move("step-000002", "new");
    for (int a = 0; a < LOOKED_AT_MAX; ++a)
        for (int b = a; b < LOOKED_AT_MAX; ++b)
            for (int c = b; c < LOOKED_AT_MAX; ++c) {
                memcpy(goes_on_at, (int[]){a, b, c}, sizeof goes_on_at);
                snprintf(what, sizeof what, "found, with steps after %d, %d and %d looks", a, b, c);
                check_found("found", what);
                for (int i = WRITER_STEPS - 1; i >= 0; --i) /* back to where it began */
                    if (goes_on_at[i] < looked_at)
                        move(writer_steps[i][1], writer_steps[i][0]);
            }
    memset(goes_on_at, 0xff, sizeof goes_on_at);
    move("found", "found.replaced");
    check_found("found//", "found, with slashes behind its name");
}

int main(void)
{
    snprintf(directory, sizeof directory, "%s/sw-folder-%d", case_root(), (int)getpid());
    a_save_that_lives_is_never_taken_for_dead();
    each_new_name_on_the_way_to_a_folder_is_durable();
    a_folder_of_which_the_rest_is_unknown_is_not_removable();
    what_is_replaced_is_found_all_the_time();
    case_clear(directory);
    return failed ? 1 : 0;
}
