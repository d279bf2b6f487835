/* save_tally.c - how rank 0 learns what each rank wrote of each block.
 *
 * The ranks of a host append their lists to one file, each behind a head (tally.h) at a place that
 * the channel reserves. The carrier of another host than rank 0's merges the lists of its host.
 * Ranks of a host hold neighbouring rows of a tensor, which share blocks, so rank 0 reads a number
 * of entries that grows with the hosts and not with the ranks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/save_job.h"

static sw_status tallies_path(const sw_saver *saver, int host, char path[SW_PATH_BYTES],
                              sw_error *err)
{
    char name[32];
    snprintf(name, sizeof name, "TALLIES-%05d", host);
    return sw_path_join(path, saver->partial, name, err);
}

sw_status sw_save_create_tallies(const sw_saver *saver, sw_error *err)
{
    char path[SW_PATH_BYTES];
    int fd = -1;
    SW_TRY(tallies_path(saver, saver->channel->host, path, err));
    SW_TRY(sw_file_create(path, &fd, err));
    return sw_file_close(&fd, path, err);
}

/* Write a list to the host's file: behind the others, or in place of them. */
static sw_status write_list(sw_saver *saver, const sw_tally_list *list, bool is_merged,
                            sw_error *err)
{
    char path[SW_PATH_BYTES];
    int fd = -1;
    sw_tally_head head = {list->size_bytes, saver->shared_part.plan->digest,
                          (uint32_t)saver->channel->rank};
    struct iovec parts[] = {{.iov_base = &head, .iov_len = sizeof head},
                            {.iov_base = list->data, .iov_len = list->size_bytes}};
    uint64_t size_bytes = sizeof head + list->size_bytes;
    SW_TRY(tallies_path(saver, saver->channel->host, path, err));
    SW_TRY(sw_save_open_late(saver, path, false, true, &fd, err));
    uint64_t place = is_merged ? 0 : sw_channel_take_place(saver->channel, size_bytes);
    sw_status status = sw_file_write_at(fd, path, parts, 2, place, err);
    if (is_merged) {
        sw_file_shorten(fd, size_bytes);
        sw_channel_set_tally_bytes(saver->channel, size_bytes);
    }
    sw_status closed = sw_file_close(&fd, path, status == SW_OK ? err : NULL);
    return status == SW_OK ? closed : status;
}

static sw_status append(void *context, uint64_t block, sw_tally tally, sw_error *err)
{
    (void)err;
    sw_tally_list_append(context, block, tally);
    return SW_OK;
}

sw_status sw_save_tell_tallies(sw_saver *saver, sw_error *err)
{
    sw_tally_list list = {0};
    if (saver->channel->rank == 0)
        return sw_save_each_tally(saver, sw_manifest_add_tally, &saver->manifest, err);
    sw_status status = sw_save_each_tally(saver, append, &list, err);
    if (status == SW_OK && list.is_out_of_memory)
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory for the tallies of %zu ranges",
                              saver->range_count);
    if (status == SW_OK)
        status = write_list(saver, &list, false, err);
    sw_tally_list_fini(&list);
    return status;
}

/* Return the list at *at of a file of `size_bytes` and advance *at; NULL: the rest is no list. */
static const uint8_t *next_list(const char *data, uint64_t size_bytes, uint64_t *at,
                                sw_tally_head *head)
{
    uint64_t left = size_bytes - *at;
    if (left < sizeof *head)
        return NULL;
    memcpy(head, data + *at, sizeof *head);
    if (head->size_bytes > left - sizeof *head)
        return NULL;
    *at += sizeof *head + head->size_bytes;
    return (const uint8_t *)data + *at - head->size_bytes;
}

static sw_status fail_cut_off(const char *path, uint64_t at, sw_error *err)
{
    SW_FAIL(err, SW_E_INVALID, "'%.300s' has no list of tallies at byte %llu", path,
            (unsigned long long)at);
}

/* A list of another plan stays as it is: rank 0 names its rank. */
static sw_status merge_lists(const sw_saver *saver, const char *path, const char *data,
                             uint64_t size_bytes, sw_tally_list *sum, bool *is_alike, sw_error *err)
{
    sw_tally_head head;
    for (uint64_t at = 0; at < size_bytes && *is_alike;) {
        const uint8_t *list = next_list(data, size_bytes, &at, &head);
        if (!list)
            return fail_cut_off(path, at, err);
        *is_alike = head.plan_digest == saver->shared_part.plan->digest;
        if (*is_alike)
            SW_TRY(sw_tally_list_merge(sum, list, head.size_bytes, err));
    }
    return SW_OK;
}

sw_status sw_save_merge_tallies(sw_saver *saver, sw_error *err)
{
    char path[SW_PATH_BYTES], *data = NULL;
    sw_tally_list sum = {0};
    bool is_alike = true;
    uint64_t size_bytes = sw_channel_tally_bytes(saver->channel, saver->channel->host);
    SW_TRY(tallies_path(saver, saver->channel->host, path, err));
    SW_TRY(sw_save_read_late(saver, path, size_bytes, &data, err));
    sw_status status = merge_lists(saver, path, data, size_bytes, &sum, &is_alike, err);
    if (status == SW_OK && is_alike)
        status = write_list(saver, &sum, true, err);
    sw_tally_list_fini(&sum);
    free(data);
    return status;
}

static sw_status take_lists(sw_saver *saver, const char *path, const char *data,
                            uint64_t size_bytes, sw_error *err)
{
    sw_tally_head head;
    for (uint64_t at = 0; at < size_bytes;) {
        const uint8_t *list = next_list(data, size_bytes, &at, &head);
        if (!list)
            return fail_cut_off(path, at, err);
        if (head.plan_digest != saver->shared_part.plan->digest)
            SW_FAIL(err, SW_E_STATE,
                    "rank %u would write other files than rank 0: names, shapes, dtypes or "
                    "max_file_bytes differ",
                    head.rank);
        SW_TRY(sw_tally_list_read(list, head.size_bytes, sw_manifest_add_tally, &saver->manifest,
                                  err));
    }
    return SW_OK;
}

sw_status sw_save_collect_tallies(sw_saver *saver, sw_error *err)
{
    int host_count = saver->channel->world_size > 1 ? saver->channel->host_count : 0;
    for (int host = 0; host < host_count; ++host) {
        char path[SW_PATH_BYTES], *data = NULL;
        uint64_t size_bytes = sw_channel_tally_bytes(saver->channel, host);
        SW_TRY(tallies_path(saver, host, path, err));
        SW_TRY(sw_save_read_late(saver, path, size_bytes, &data, err));
        sw_status status = take_lists(saver, path, data, size_bytes, err);
        free(data);
        SW_TRY(status);
        SW_TRY(sw_file_remove(path, err));
    }
    return SW_OK;
}
