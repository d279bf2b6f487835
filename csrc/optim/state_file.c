/* state_file.c - a nameless file in segments that are mapped one by one, so that no address moves.
 */
#include "optim/state_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/bytes.h"

sw_status sw_state_file_init(sw_state_file *file, const char *folder, const char *label,
                             sw_error *err)
{
    *file = (sw_state_file){.fd = -1};
    char name[256];
    snprintf(name, sizeof name, "%.200s", label);
    SW_TRY(sw_path_join(file->path, folder, name, err));
    return sw_file_create_nameless(folder, file->path, true, &file->fd, err);
}

void sw_state_file_fini(sw_state_file *file)
{
    for (size_t i = 0; i < file->segment_count; ++i)
        munmap(file->segments[i].base, file->segments[i].size_bytes);
    free(file->segments);
    (void)!sw_file_close(&file->fd, file->path, NULL);
    *file = (sw_state_file){.fd = -1};
}

sw_status sw_state_file_grow(sw_state_file *file, size_t size_bytes, uint8_t **address,
                             sw_error *err)
{
    size_t whole = 0;
    /* a segment begins where the last one ended, and mmap takes whole pages of this kernel */
    if (size_bytes == 0 || !sw_size_round_up(size_bytes, sw_file_page_bytes(), &whole))
        SW_FAIL(err, SW_E_INVALID, "'%s' cannot grow by %zu bytes", file->path, size_bytes);
    sw_state_segment *segments =
        realloc(file->segments, (file->segment_count + 1) * sizeof *segments);
    if (!segments)
        SW_FAIL(err, SW_E_MEMORY, "no memory for another segment of '%s'", file->path);
    file->segments = segments;
    SW_TRY(sw_file_extend(file->fd, file->path, file->size_bytes, whole, err));
    void *base =
        mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, (off_t)file->size_bytes);
    if (base == MAP_FAILED) {
        int code = errno;
        sw_file_shorten(file->fd, file->size_bytes);
        return sw_error_set(err, SW_E_MEMORY, code, "mapping %zu bytes of '%s' failed: %s", whole,
                            file->path, strerror(code));
    }
    file->segments[file->segment_count++] =
        (sw_state_segment){.base = base, .size_bytes = whole, .offset = file->size_bytes};
    file->size_bytes += whole;
    *address = base;
    return SW_OK;
}

uint64_t sw_state_file_locate(const sw_state_file *file, const void *address, size_t size_bytes)
{
    uintptr_t at = (uintptr_t)address;
    for (size_t i = 0; i < file->segment_count; ++i) {
        const sw_state_segment *segment = &file->segments[i];
        uintptr_t base = (uintptr_t)segment->base;
        if (at >= base && at - base <= segment->size_bytes &&
            size_bytes <= segment->size_bytes - (at - base))
            return segment->offset + (at - base);
    }
    return UINT64_MAX;
}

sw_status sw_state_file_read(sw_state_file *file, void *data, size_t size_bytes, uint64_t offset,
                             sw_error *err)
{
    return sw_file_read_at(file->fd, file->path, data, size_bytes, offset, err);
}

sw_status sw_state_file_write(sw_state_file *file, const void *data, size_t size_bytes,
                              uint64_t offset, sw_error *err)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = size_bytes};
    return sw_file_write_at(file->fd, file->path, &part, 1, offset, err);
}

bool sw_state_file_is_direct(const sw_state_file *file)
{
    return sw_file_is_direct(file->fd);
}

void sw_state_file_forget(sw_state_file *file)
{
    for (size_t i = 0; i < file->segment_count; ++i)
        (void)madvise(file->segments[i].base, file->segments[i].size_bytes, MADV_DONTNEED);
}
