/* recorded_disk.h - a file system in memory: how it was, and each change since, so that a test can
 * build it as a power cut may leave it. A change of a name belongs to its folder, one of bytes to
 * its file; either lasts once that was synced. For one program: it has state. */
#ifndef RECORDED_DISK_H
#define RECORDED_DISK_H

#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "platform/file.h"

enum { OPS_MAX = 4096, NODES_MAX = 256, NAME_BYTES = 256 };

typedef enum op_kind {
    OP_LINK,
    OP_UNLINK,
    OP_RENAME,
    OP_EXCHANGE,
    OP_WRITE,
    OP_SIZE,
    OP_SYNC
} op_kind;

typedef struct op {
    op_kind kind;
    ino_t node, folder; /* what changes; the folder whose names change */
    bool is_folder;
    char name[NAME_BYTES], other[NAME_BYTES];
    uint64_t offset, size;
    uint8_t *data; /* owned */
} op;

static op ops[OPS_MAX];
static size_t op_count;
static bool is_recording;

static ino_t node_of(const char *path, bool *is_folder)
{
    struct stat info;
    if (lstat(path, &info) != 0)
        return 0;
    if (is_folder)
        *is_folder = S_ISDIR(info.st_mode);
    return info.st_ino;
}

static ino_t node_of_fd(int fd, bool *is_folder)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return 0;
    *is_folder = S_ISDIR(info.st_mode);
    return info.st_ino;
}

static ino_t folder_of(const char *path)
{
    char parent[SW_PATH_BYTES];
    return sw_path_parent(path, parent, NULL) == SW_OK ? node_of(parent, NULL) : 0;
}

static const char *base_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static op *record(op_kind kind, ino_t node, ino_t folder, bool is_folder, const char *name,
                  const char *other)
{
    if (!is_recording || op_count == OPS_MAX)
        return NULL;
    op *made = &ops[op_count++];
    *made = (op){.kind = kind, .node = node, .folder = folder, .is_folder = is_folder};
    snprintf(made->name, sizeof made->name, "%s", name);
    snprintf(made->other, sizeof made->other, "%s", other);
    return made;
}

typedef struct entry {
    char name[NAME_BYTES];
    ino_t node;
} entry;

typedef struct node {
    ino_t number;
    bool is_folder;
    entry entries[32];
    size_t entry_count;
    uint8_t *data; /* owned */
    uint64_t size;
} node;

typedef struct disk {
    node nodes[NODES_MAX];
    size_t count;
} disk;

static node *disk_node(disk *d, ino_t number, bool is_folder)
{
    for (size_t i = 0; i < d->count; ++i)
        if (d->nodes[i].number == number)
            return &d->nodes[i];
    if (d->count == NODES_MAX)
        exit(98);
    d->nodes[d->count] = (node){.number = number, .is_folder = is_folder};
    return &d->nodes[d->count++];
}

static entry *find_entry(node *folder, const char *name)
{
    for (size_t i = 0; i < folder->entry_count; ++i)
        if (strcmp(folder->entries[i].name, name) == 0)
            return &folder->entries[i];
    return NULL;
}

static void set_entry(node *folder, const char *name, ino_t number)
{
    entry *found = find_entry(folder, name);
    if (!found)
        found = &folder->entries[folder->entry_count++];
    snprintf(found->name, sizeof found->name, "%s", name);
    found->node = number;
}

static void drop_entry(node *folder, const char *name)
{
    entry *found = find_entry(folder, name);
    if (found)
        *found = folder->entries[--folder->entry_count];
}

static void write_node(node *file, uint64_t offset, const uint8_t *data, uint64_t size)
{
    if (offset + size > file->size) {
        file->data = realloc(file->data, offset + size + 1);
        memset(file->data + file->size, 0, offset + size - file->size);
        file->size = offset + size;
    }
    if (data && size)
        memcpy(file->data + offset, data, size);
}

/* The real tree as it is now. */
static void scan(disk *d, const char *path)
{
    ino_t number = node_of(path, NULL);
    DIR *stream = opendir(path);
    disk_node(d, number, true);
    for (struct dirent *found; stream && (found = readdir(stream));) {
        char child[SW_PATH_BYTES];
        bool is_folder = false;
        if (found->d_name[0] == '.')
            continue;
        snprintf(child, sizeof child, "%s/%s", path, found->d_name);
        ino_t child_number = node_of(child, &is_folder);
        set_entry(disk_node(d, number, true), found->d_name, child_number);
        if (is_folder) {
            scan(d, child);
        } else {
            char *data = NULL;
            size_t size = 0;
            if (sw_file_read_whole(child, 1 << 30, &data, &size, NULL) != SW_OK)
                exit(98);
            write_node(disk_node(d, child_number, false), 0, (uint8_t *)data, size);
            free(data);
        }
    }
    closedir(stream);
}

static void copy_disk(disk *to, const disk *from)
{
    for (size_t i = 0; i < to->count; ++i)
        free(to->nodes[i].data);
    *to = *from;
    for (size_t i = 0; i < to->count; ++i)
        if (from->nodes[i].data) {
            to->nodes[i].data = malloc(from->nodes[i].size + 1);
            memcpy(to->nodes[i].data, from->nodes[i].data, from->nodes[i].size);
        }
}

/* A name that this change needs and that is not there means that an earlier change was lost: then
 * this one is, too. */
static void apply(disk *d, const op *change)
{
    node *folder = change->folder ? disk_node(d, change->folder, true) : NULL;
    entry *a = folder ? find_entry(folder, change->name) : NULL,
          *b = folder ? find_entry(folder, change->other) : NULL;
    switch (change->kind) {
    case OP_LINK:
        disk_node(d, change->node, change->is_folder);
        set_entry(disk_node(d, change->folder, true), change->name, change->node);
        break;
    case OP_UNLINK:
        drop_entry(folder, change->name);
        break;
    case OP_RENAME:
        if (a) {
            set_entry(folder, change->other, a->node);
            drop_entry(folder, change->name);
        }
        break;
    case OP_EXCHANGE:
        if (a && b) {
            ino_t number = a->node;
            a->node = b->node;
            b->node = number;
        }
        break;
    case OP_WRITE:
        write_node(disk_node(d, change->node, false), change->offset, change->data, change->size);
        break;
    case OP_SIZE:
        write_node(disk_node(d, change->node, false), change->size, NULL, 0);
        break;
    case OP_SYNC:
        break;
    }
}

static bool is_synced(size_t index, size_t end)
{
    const op *change = &ops[index];
    ino_t number =
        change->kind == OP_WRITE || change->kind == OP_SIZE ? change->node : change->folder;
    for (size_t i = index + 1; i < end; ++i)
        if (ops[i].kind == OP_SYNC && ops[i].node == number)
            return true;
    return false;
}

static void materialise(disk *d, ino_t number, const char *path)
{
    node *found = disk_node(d, number, false);
    if (!found->is_folder) {
        FILE *file = fopen(path, "wb");
        if (!file ||
            fwrite(found->data ? found->data : (uint8_t *)"", 1, found->size, file) !=
                found->size ||
            fclose(file) != 0)
            exit(98);
        return;
    }
    mkdir(path, 0777);
    for (size_t i = 0; i < found->entry_count; ++i) {
        char child[SW_PATH_BYTES];
        snprintf(child, sizeof child, "%s/%s", path, found->entries[i].name);
        materialise(d, found->entries[i].node, child);
    }
}

#endif
