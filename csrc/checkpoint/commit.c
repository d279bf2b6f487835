/* commit.c - see commit.h for the rule and the order, docs/design/checkpoint.md
 * for why.
 *
 * An inner folder may be empty or hold listed files: removing it loses nothing. A link or a pipe in
 * place of a file counts as damage; the target of a link stays. */
#include "checkpoint/commit.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "checkpoint/manifest.h"
#include "checkpoint/read.h"
#include "checkpoint/write.h"
#include "platform/file.h"

/* ---- what may be removed ---- */

#define STATE_NAME "state.json"
#define ONLY_CHECKPOINTS ": a save replaces only checkpoints, move it away"

/* File names of version 1; # stands for digits. */
static const char *const OWN_NAMES[] = {
    SW_MANIFEST_NAME,
    SW_LOCK_NAME, /* left by a save that died right after its commit */
    STATE_NAME,
    "state.safetensors",
    "model.safetensors",
    "model-#-of-#.safetensors",
    "model.safetensors.index.json",
    "optimizer.json",
    "optimizer-#-of-#.safetensors",
    "ranks/all.jsonl",
    "ranks/all.safetensors",
    "ranks/#.json",
    "ranks/#.safetensors",
};

typedef struct look {
    const char *folder;          /* the checkpoint, or a folder in it */
    const char *prefix;          /* prefix of names in this folder: "", or "ranks/" */
    const sw_manifest *listed;   /* NULL: the manifest is damaged, and names alone decide */
    char foreign[SW_PATH_BYTES]; /* first name that does not belong; "": none */
    bool is_empty, has_state;
    sw_status status;
    sw_error *err; /* error of an inner folder that cannot be listed */
} look;

static bool matches(const char *name, const char *pattern)
{
    for (; *pattern; ++pattern) {
        if (*pattern != '#') {
            if (*name++ != *pattern)
                return false;
            continue;
        }
        if (!isdigit((unsigned char)*name))
            return false;
        while (isdigit((unsigned char)*name))
            ++name;
    }
    return *name == '\0';
}

static bool belongs(const sw_manifest *listed, const char *path)
{
    if (listed)
        return strcmp(path, SW_MANIFEST_NAME) == 0 || strcmp(path, SW_LOCK_NAME) == 0 ||
               sw_manifest_find(listed, path);
    for (size_t i = 0; i < sizeof OWN_NAMES / sizeof *OWN_NAMES; ++i)
        if (matches(path, OWN_NAMES[i]))
            return true;
    return false;
}

static bool look_at(void *context, const char *name)
{
    look *l = context;
    if (strncmp(name, ".nfs", 4) == 0) /* a removed file that a process has open */
        return true;
    char path[SW_PATH_BYTES], full[SW_PATH_BYTES];
    struct stat info;
    l->is_empty = false;
    snprintf(l->foreign, sizeof l->foreign, "%s%s", l->prefix, name); /* until checked */
    if (snprintf(path, sizeof path, "%s%s", l->prefix, name) >= SW_PATH_BYTES ||
        sw_path_join(full, l->folder, name, NULL) != SW_OK || lstat(full, &info) != 0)
        return false;
    if (S_ISDIR(info.st_mode) && !*l->prefix) {
        look inner = {.folder = full, .listed = l->listed, .err = l->err};
        char prefix[SW_PATH_BYTES];
        if (snprintf(prefix, sizeof prefix, "%s/", name) >= SW_PATH_BYTES)
            return false;
        inner.prefix = prefix;
        l->status = sw_folder_list(full, look_at, &inner, l->err);
        snprintf(l->foreign, sizeof l->foreign, "%s", inner.foreign);
    } else if (!S_ISDIR(info.st_mode) && belongs(l->listed, path)) {
        l->has_state |= strcmp(path, STATE_NAME) == 0;
        l->foreign[0] = '\0';
    }
    return l->status == SW_OK && !*l->foreign;
}

/* True if a failure to read a manifest may be temporary: it proves nothing about the manifest. */
static bool is_of_a_moment(const sw_error *why)
{
    return why->status == SW_E_MEMORY ||
           (why->status == SW_E_OS && why->detail != ENOENT && why->detail != ELOOP &&
            why->detail != ENXIO && why->detail != ENOTDIR);
}

static sw_status check_names(const char *path, const sw_manifest *listed, bool has_manifest,
                             sw_error *err)
{
    look l = {.folder = path, .prefix = "", .listed = listed, .is_empty = true, .err = err};
    SW_TRY(sw_folder_list(path, look_at, &l, err));
    SW_TRY(l.status);
    if (l.is_empty)
        return SW_OK;
    if (!has_manifest)
        SW_FAIL(err, SW_E_INVALID, "'%.300s' has no " SW_MANIFEST_NAME ONLY_CHECKPOINTS, path);
    if (*l.foreign)
        SW_FAIL(err, SW_E_INVALID,
                "'%.200s' holds '%.100s', which no checkpoint lists" ONLY_CHECKPOINTS, path,
                l.foreign);
    if (!listed && !l.has_state)
        SW_FAIL(err, SW_E_INVALID,
                "'%.300s' has a " SW_MANIFEST_NAME
                " that belongs to no checkpoint" ONLY_CHECKPOINTS,
                path);
    return SW_OK;
}

sw_status sw_checkpoint_check_removable(const char *path, sw_error *err)
{
    struct stat info;
    sw_manifest manifest = {0};
    sw_error why = {0};
    if (lstat(path, &info) != 0) {
        int code = errno;
        if (code == ENOENT || code == ENOTDIR)
            return SW_OK;
        return sw_error_set(err, SW_E_OS, code, "looking at '%.300s' failed: %s", path,
                            strerror(code));
    }
    if (!S_ISDIR(info.st_mode))
        SW_FAIL(err, SW_E_INVALID, "'%.300s' is not a folder" ONLY_CHECKPOINTS, path);
    sw_status status = sw_manifest_read(path, &manifest, &why);
    if (status == SW_OK) {
        status = check_names(path, &manifest, true, err);
        sw_manifest_fini(&manifest);
        return status;
    }
    if (status == SW_E_UNSUPPORTED || is_of_a_moment(&why))
        return sw_error_pass(err, &why);
    return check_names(path, NULL, status != SW_E_OS || why.detail != ENOENT, err);
}

sw_status sw_checkpoint_check_replaceable(const char *folder, sw_error *err)
{
    char replaced[SW_PATH_BYTES];
    SW_TRY(sw_checkpoint_replaced_name(replaced, folder, err));
    SW_TRY(sw_checkpoint_check_removable(folder, err));
    return sw_checkpoint_check_removable(replaced, err);
}

/* ---- the commit ---- */

/* Sync files again after their writers synced them. This costs nothing if no page is dirty, and
 * covers a writer on another client of a network file system. Also check the files' sizes. */
static sw_status sync_files(const char *partial, const sw_manifest *manifest, sw_error *err)
{
    char path[SW_PATH_BYTES];
    for (size_t i = 0; i < manifest->file_count; ++i) {
        const sw_manifest_file *file = &manifest->files[i];
        int fd = -1;
        uint64_t size_bytes = 0;
        SW_TRY(sw_path_join(path, partial, file->path, err));
        SW_TRY(sw_file_open_read(path, false, &fd, &size_bytes, err));
        sw_status status = sw_file_sync(fd, path, err);
        SW_TRY(sw_file_close_after(&fd, path, status, err));
        if (size_bytes != file->size_bytes)
            SW_FAIL(err, SW_E_STATE,
                    "'%s' has %llu bytes where %llu were written: someone else changed it", path,
                    (unsigned long long)size_bytes, (unsigned long long)file->size_bytes);
    }
    return SW_OK;
}

typedef struct manifest_file {
    const char *path;
    int fd;
    uint64_t offset;
} manifest_file;

static sw_status append_part(void *context, const char *part, size_t size_bytes, sw_error *err)
{
    manifest_file *file = context;
    struct iovec bytes = {.iov_base = (void *)(uintptr_t)part, .iov_len = size_bytes};
    SW_TRY(sw_file_write_at(file->fd, file->path, &bytes, 1, file->offset, err));
    file->offset += size_bytes;
    return SW_OK;
}

static sw_status write_manifest(const char *partial, const sw_manifest *manifest, sw_error *err)
{
    char temporary[SW_PATH_BYTES], final[SW_PATH_BYTES];
    manifest_file file = {.path = temporary, .fd = -1};
    SW_TRY(sw_path_join(temporary, partial, "MANIFEST.tmp", err));
    SW_TRY(sw_path_join(final, partial, SW_MANIFEST_NAME, err));
    SW_TRY(sw_file_create(temporary, &file.fd, err));
    sw_status status = sw_manifest_print(manifest, append_part, &file, err);
    if (status == SW_OK)
        status = sw_file_sync(file.fd, temporary, err);
    SW_TRY(sw_file_close_after(&file.fd, temporary, status, err));
    SW_TRY(sw_file_rename(temporary, final, err));
    return sw_folder_sync(partial, err);
}

static bool has_nonce(const char *folder, const char *nonce)
{
    sw_manifest found = {0};
    bool same = sw_manifest_read(folder, &found, NULL) == SW_OK && strcmp(found.nonce, nonce) == 0;
    sw_manifest_fini(&found);
    return same;
}

void sw_checkpoint_identify(const char *folder, char identity[SW_IDENTITY_BYTES])
{
    char path[SW_PATH_BYTES];
    struct stat info;
    sw_manifest found = {0};
    *identity = 0;
    if (sw_checkpoint_locate(folder, path, NULL) != SW_OK || lstat(path, &info) != 0)
        return;
    bool is_read = sw_manifest_read(path, &found, NULL) == SW_OK;
    snprintf(identity, SW_IDENTITY_BYTES, "%llu:%llu:%s", (unsigned long long)info.st_dev,
             (unsigned long long)info.st_ino, is_read ? found.nonce : "");
    sw_manifest_fini(&found);
}

static sw_status fail_changed(const char *folder, sw_error *err)
{
    SW_FAIL(err, SW_E_STATE,
            "'%.300s' was written by another save after this one began, and is left as it is: each "
            "job and each group of ranks that saves needs a path of its own",
            folder);
}

/* `path` is `folder`, or the path to which it moved. An empty folder passes: a user cleared it. */
static sw_status check_identity(const char *path, const char *folder, const char *replaces,
                                sw_error *err)
{
    char found[SW_IDENTITY_BYTES];
    sw_checkpoint_identify(path, found);
    return !*found || strcmp(found, replaces) == 0 ? SW_OK : fail_changed(folder, err);
}

static sw_status trash_name(char trash[SW_PATH_BYTES], const char *folder, const char *nonce,
                            sw_error *err)
{
    if (snprintf(trash, SW_PATH_BYTES, "%s.%s.trash", folder, nonce) >= SW_PATH_BYTES)
        SW_FAIL(err, SW_E_INVALID, "a path must be shorter than %d bytes: '%.200s'", SW_PATH_BYTES,
                folder);
    return SW_OK;
}

/* A network file system may lose the reply to a rename and repeat the request. The repetition finds
 * nothing to rename; the rename succeeded if `to` exists with this nonce (NULL: any). */
static sw_status rename_once(const char *from, const char *to, const char *nonce, sw_error *err)
{
    sw_error found = {0};
    sw_status status = sw_file_rename(from, to, &found);
    if (status == SW_E_OS && found.detail == ENOENT &&
        (nonce ? has_nonce(to, nonce) : sw_file_exists(to)))
        return SW_OK;
    return status == SW_OK ? SW_OK : sw_error_pass(err, &found);
}

/* Move the remains of a dead save away from the replaced name; they are unlinked after the verdict.
 * If `folder` is missing, a live save has just moved it to that name. */
static sw_status clear_replaced(const char *replaced, const char *folder, const char *nonce,
                                sw_error *err)
{
    char trash[SW_PATH_BYTES], parent[SW_PATH_BYTES];
    if (!sw_file_exists(replaced))
        return SW_OK;
    SW_TRY(sw_path_parent(folder, parent, err));
    SW_TRY(trash_name(trash, replaced, nonce, err));
    SW_TRY(sw_folder_sync(parent, err));
    SW_TRY(sw_checkpoint_check_removable(replaced, err));
    SW_TRY(sw_file_rename(replaced, trash, err));
    if (sw_file_exists(folder))
        return SW_OK;
    (void)!sw_file_rename(trash, replaced, NULL);
    return fail_changed(folder, err);
}

/* Replace on a file system that cannot exchange two names. The old folder takes the name that
 * readers try while `folder` is missing, and keeps it until the new folder's name is durable. */
static sw_status replace_in_two_steps(const char *partial, const char *folder, const char *replaces,
                                      const char *nonce, sw_error *err)
{
    char replaced[SW_PATH_BYTES];
    SW_TRY(sw_checkpoint_replaced_name(replaced, folder, err));
    SW_TRY(clear_replaced(replaced, folder, nonce, err));
    SW_TRY(rename_once(folder, replaced, NULL, err));
    sw_status status = check_identity(replaced, folder, replaces, err);
    if (status == SW_OK)
        status = sw_checkpoint_check_removable(replaced, err);
    if (status == SW_OK)
        status = rename_once(partial, folder, nonce, err);
    if (status != SW_OK && !sw_file_exists(folder))
        (void)!sw_file_rename(replaced, folder, NULL); /* if it fails, readers find it there */
    return status;
}

/* Put back an exchanged folder that must not be removed; else move it to a name that no save
 * clears. */
static void take_back(const char *partial, const char *folder, const char *parent)
{
    char replaced[SW_PATH_BYTES];
    bool swapped = false;
    if ((sw_file_exchange(partial, folder, &swapped, NULL) != SW_OK || !swapped) &&
        sw_checkpoint_replaced_name(replaced, folder, NULL) == SW_OK)
        (void)!sw_file_rename(partial, replaced, NULL);
    (void)!sw_folder_sync(parent, NULL);
}

/* Replace an existing folder, in one step if the system can. The replaced folder may have changed
 * since the check. After an error every rank removes `partial`, which now names the old checkpoint.
 * So an error reverts the exchange, and a durable exchange returns no error. */
static sw_status replace(const char *partial, const char *folder, const char *replaces,
                         const char *nonce, sw_error *err)
{
    char trash[SW_PATH_BYTES], parent[SW_PATH_BYTES];
    bool swapped = false;
    SW_TRY(trash_name(trash, folder, nonce, err));
    SW_TRY(sw_path_parent(folder, parent, err));
    SW_TRY(sw_file_exchange(partial, folder, &swapped, err));
    if (!swapped) {
        SW_TRY(replace_in_two_steps(partial, folder, replaces, nonce, err));
        return sw_folder_sync(parent, err);
    }
    sw_status status = check_identity(partial, folder, replaces, err);
    if (status == SW_OK)
        status = sw_checkpoint_check_removable(partial, err);
    if (status == SW_OK)
        status = sw_folder_sync(parent, err);
    if (status == SW_OK)
        (void)!sw_file_rename(partial, trash, NULL);
    else
        take_back(partial, folder, parent);
    return status;
}

/* Publish under a new name: rename() fails if a folder with entries has this name by now. */
static sw_status publish_new(const char *partial, const char *folder, const char *nonce,
                             sw_error *err)
{
    char parent[SW_PATH_BYTES];
    sw_error found = {0};
    SW_TRY(sw_path_parent(folder, parent, err));
    sw_status status = rename_once(partial, folder, nonce, &found);
    if (status == SW_E_OS &&
        (found.detail == EEXIST || found.detail == ENOTEMPTY || found.detail == ENOTDIR))
        return fail_changed(folder, err);
    return status == SW_OK ? sw_folder_sync(parent, err) : sw_error_pass(err, &found);
}

/* Publish durably. */
static sw_status publish(const char *partial, const char *folder, const char *replaces,
                         const char *nonce, sw_error *err)
{
    return sw_file_exists(folder) ? replace(partial, folder, replaces, nonce, err)
                                  : publish_new(partial, folder, nonce, err);
}

sw_status sw_commit(const char *partial, const char *folder, const char *replaces,
                    const sw_manifest *manifest, sw_error *err)
{
    char ranks[SW_PATH_BYTES];
    SW_TRY(sw_path_join(ranks, partial, SW_RANKS_FOLDER, err));
    SW_TRY(sync_files(partial, manifest, err));
    if (sw_file_exists(ranks))
        SW_TRY(sw_folder_sync(ranks, err));
    SW_TRY(write_manifest(partial, manifest, err));
    SW_TRY(check_identity(folder, folder, replaces, err));
    SW_TRY(sw_checkpoint_check_replaceable(folder, err));
    return publish(partial, folder, replaces, manifest->nonce, err);
}

void sw_commit_clean(const char *partial, const char *folder, const char *nonce)
{
    char trash[SW_PATH_BYTES], replaced[SW_PATH_BYTES];
    const char *old = replaced;
    (void)!sw_folder_remove(partial, NULL);
    if (trash_name(trash, folder, nonce, NULL) == SW_OK)
        (void)!sw_folder_remove(trash, NULL);
    if (sw_checkpoint_replaced_name(replaced, folder, NULL) != SW_OK)
        return;
    if (trash_name(trash, replaced, nonce, NULL) == SW_OK)
        (void)!sw_folder_remove(trash, NULL);
    if (sw_file_exists(replaced) && has_nonce(folder, nonce)) /* otherwise of another save */
        sw_retire(&old, 1, nonce);
}

void sw_retire(const char *const *folders, size_t count, const char *nonce)
{
    char trash[SW_PATH_BYTES], parent[SW_PATH_BYTES];
    for (size_t i = 0; i < count; ++i)
        if (sw_file_exists(folders[i]) &&
            sw_checkpoint_check_removable(folders[i], NULL) == SW_OK &&
            trash_name(trash, folders[i], nonce, NULL) == SW_OK &&
            sw_path_parent(folders[i], parent, NULL) == SW_OK &&
            sw_file_rename(folders[i], trash, NULL) == SW_OK &&
            sw_folder_sync(parent, NULL) == SW_OK)
            (void)!sw_folder_remove(trash, NULL);
}
