/* test_memory.c - mappings: large ones are aligned to huge pages; bytes stay when pages are
 * collapsed; two mappings of one memfd share bytes; unmapping releases everything; a file's mapping
 * asks for huge pages and has the file's bytes. */
#include "platform/memory.h"

#include "platform/file_memory.h"
#include "platform/limits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int failures;

static void expect(int holds, const char *expectation)
{
    if (!holds) {
        printf("failed: %s\n", expectation);
        failures++;
    }
}

static size_t mapped_kib(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%zu", &pages) != 1)
        pages = 0;
    if (file)
        fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE) / 1024;
}

static void check_shared(size_t size_bytes)
{
    int fd = -1;
    uint8_t *one = NULL, *two = NULL;
    sw_error err;
    size_t before = mapped_kib();
    expect(sw_memfd_create(size_bytes, "test", &fd, &err) == SW_OK, "a memfd is created");
    expect(sw_memfd_map(fd, size_bytes, &one, &err) == SW_OK &&
               sw_memfd_map(fd, size_bytes, &two, &err) == SW_OK,
           "a memfd is mapped twice");
    if (!one || !two)
        return;
    if (size_bytes >= (2u << 20))
        expect((uintptr_t)one % (2u << 20) == 0 && (uintptr_t)two % (2u << 20) == 0,
               "large mappings are aligned");
    for (size_t i = 0; i < size_bytes; i += 509)
        one[i] = (uint8_t)(i / 509 + 1);
    sw_memory_populate(one, size_bytes);
    size_t wrong = 0;
    for (size_t i = 0; i < size_bytes; i += 509)
        wrong += two[i] != (uint8_t)(i / 509 + 1);
    expect(wrong == 0, "bytes stay when their pages are collapsed");
    two[size_bytes - 1] = 77;
    expect(one[size_bytes - 1] == 77, "a write through one mapping shows in the other");
    sw_memory_unmap(one, size_bytes);
    sw_memory_unmap(two, size_bytes);
    close(fd);
    size_t after = mapped_kib();
    expect(after < before + 1024 || after < before + size_bytes / 2048,
           "unmapping releases all pages");
}

/* Populating a range makes all its pages present, huge or small, and none beside them. */
static void check_populated(size_t size_bytes)
{
    enum { PAGE = 4096, MARGIN = 3 };
    size_t pages = size_bytes / PAGE + 2 * MARGIN + 2;
    int fd = -1;
    uint8_t *memory = NULL;
    unsigned char *found = calloc(pages, 1);
    sw_error err;
    if (found && sw_memfd_create(pages * PAGE, "test", &fd, &err) == SW_OK &&
        sw_memfd_map(fd, pages * PAGE, &memory, &err) == SW_OK) {
        sw_memory_populate(memory + MARGIN * PAGE + 5, size_bytes);
        size_t last = MARGIN + (size_bytes + 4) / PAGE, wrong = 0;
        expect(mincore(memory, pages * PAGE, found) == 0, "mincore");
        for (size_t i = 0; i < pages; ++i)
            wrong += (found[i] & 1) != (i >= MARGIN && i <= last);
        expect(wrong == 0, "exactly the range's pages are present");
        sw_memory_unmap(memory, pages * PAGE);
    }
    free(found);
    close(fd);
}

static void check_private(size_t size_bytes)
{
    uint8_t *pages = NULL;
    sw_error err;
    expect(sw_pages_map(size_bytes, &pages, &err) == SW_OK, "private pages are mapped");
    if (!pages)
        return;
    sw_memory_populate(pages, size_bytes);
    expect(pages[0] == 0 && pages[size_bytes - 1] == 0, "they are zero");
    pages[size_bytes - 1] = 1;
    sw_memory_unmap(pages, size_bytes);
}

/* Return whether the kernel notes the wish for huge pages of the mapping that begins at an address.
 */
static bool asks_for_huge(const uint8_t *begin)
{
    char line[512], head[32];
    bool inside = false, found = false;
    FILE *maps = fopen("/proc/self/smaps", "r");
    snprintf(head, sizeof head, "%lx-", (unsigned long)(uintptr_t)begin);
    while (maps && fgets(line, sizeof line, maps)) {
        inside = inside || strncmp(line, head, strlen(head)) == 0;
        if (inside && strncmp(line, "VmFlags:", 8) == 0) {
            found = strstr(line, " hg") != NULL;
            break;
        }
    }
    if (maps)
        fclose(maps);
    return found || !inside; /* an emulator lists other addresses */
}

/* What is written to a file's mapping is read back, also once its pages have left the process. */
static void check_file(void)
{
    sw_error err;
    sw_file_memory file;
    const size_t size_bytes = (5u << 20) + 4096;
    uint8_t *read = malloc(size_bytes);
    if (!read)
        exit(1);
    expect(sw_file_memory_init(&file, "/tmp", "memory", size_bytes, &err) == SW_OK &&
               sw_file_memory_create(&file, "/tmp", &err) == SW_OK &&
               sw_file_memory_map(&file, &err) == SW_OK,
           "a file is mapped");
    expect((uintptr_t)file.begin % (2u << 20) == 0, "a file's mapping is aligned to huge pages");
    expect(access("/sys/kernel/mm/transparent_hugepage", F_OK) != 0 || asks_for_huge(file.begin),
           "a file's mapping asks for huge pages");
    for (size_t at = 0; at < size_bytes; ++at)
        file.begin[at] = (uint8_t)(at * 7 >> 3);
    for (int turn = 0; turn < 2; ++turn) {
        expect(sw_file_memory_read(&file, read, file.begin, size_bytes, &err) == SW_OK &&
                   memcmp(read, file.begin, size_bytes) == 0,
               "the descriptor reads what the mapping holds");
        expect(sw_file_memory_write_back(&file, file.begin, size_bytes, &err) == SW_OK,
               "pages are written back");
    }
    sw_file_memory_fini(&file);
    free(read);
}

/* Ranks of a later host are called what they are in the whole group. */
static void check_needs_are_named(void)
{
    const sw_memory_need needs[] = {{.size_bytes = 6, .group = 1, .left_bytes = 10, .rank = 2},
                                    {.size_bytes = 6, .group = 1, .left_bytes = 10, .rank = 3}};
    sw_error err;
    expect(sw_limits_check_needs(needs, sizeof *needs, 2, "arena", &err) == SW_E_MEMORY &&
               err.detail == 3 && strstr(err.message, "on 2 ranks up to rank 3 together"),
           err.message);
}

int main(void)
{
    check_needs_are_named();
    check_file();
    const size_t sizes[] = {1,        4096,           5000,     (2u << 20) - 1,
                            2u << 20, (2u << 20) + 1, 9u << 20, (33u << 20) + 12345};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        check_shared(sizes[i]);
        check_private(sizes[i]);
        check_populated(sizes[i]);
    }
    uint8_t *none = NULL;
    sw_error err;
    expect(sw_memfd_map(0, (size_t)1 << 40, &none, &err) != SW_OK && !none,
           "a file descriptor that is no memfd is refused");
    sw_memory_unmap(NULL, 0);
    return failures ? 1 : 0;
}
