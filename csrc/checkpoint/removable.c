/* removable.c - see removable.h for the rule and docs/design/checkpoint_directory.md for why.
 *
 * An inner folder may be empty or hold listed files: removing it loses nothing. A link or a pipe in
 * place of a file counts as damage; the target of a link stays. */
#include "checkpoint/removable.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "checkpoint/manifest.h"
#include "checkpoint/open.h"
#include "checkpoint/save_lock.h"
#include "platform/file.h"

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
    if (status == SW_E_UNSUPPORTED || is_of_a_moment(&why)) {
        if (err)
            *err = why;
        return status;
    }
    return check_names(path, NULL, status != SW_E_OS || why.detail != ENOENT, err);
}

sw_status sw_checkpoint_check_replaceable(const char *folder, sw_error *err)
{
    char replaced[SW_PATH_BYTES];
    SW_TRY(sw_checkpoint_replaced_name(replaced, folder, err));
    SW_TRY(sw_checkpoint_check_removable(folder, err));
    return sw_checkpoint_check_removable(replaced, err);
}
