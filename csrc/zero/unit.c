/* unit.c - map and fill units from the ranks' slices; see unit.h. */
#include "zero/unit.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"
#include "platform/clock.h"
#include "platform/file_memory.h"
#include "platform/memory.h"
#include "zero/page_ring.h"

enum {
    NAME_BYTES = 96,
    RECORDS_AT_ONCE = 1024,  /* that are read from a file before they are decoded */
    GATHERS_A_STEP_MAX = 16, /* of each unit, whose order is remembered */
};

typedef struct unit {
    char name[NAME_BYTES];
    sw_shard_state state;
    uint8_t *address; /* owned: a reserved range; NULL if size_bytes is 0 */
    size_t size_bytes;
    sw_unit_run *runs; /* owned */
    size_t run_count;
    uint32_t *chunks; /* owned; chunks of the ring while not SHARDED */
} unit;

struct sw_units {
    size_t count;
    uint8_t **slices, **codes; /* owned tables of borrowed addresses; codes NULL: none */
    unit *unit;                /* owned */
    sw_page_ring ring;
    sw_units_stats stats;
    const sw_file_memory *file, *code_file; /* borrowed; NULL: none */
    size_t *order; /* owned, with a file: the units that this step gathered, then what the last
                    * one gathered from there on */
    size_t at, expected; /* gathers of this step, and of the last one */
    uint8_t *records;    /* owned, with a code_file */
};

static size_t records_of(size_t size_bytes)
{
    return size_bytes / SW_UNIT_BLOCK_BYTES + (size_bytes % SW_UNIT_BLOCK_BYTES != 0);
}

static bool run_is_coded_well(const sw_unit_run *run, const sw_unit_parts *parts)
{
    size_t end = run->source_bytes / SW_UNIT_BLOCK_BYTES + records_of(run->size_bytes);
    return parts->codes && run->source_bytes % SW_UNIT_BLOCK_BYTES == 0 &&
           run->target_bytes % sizeof(float) == 0 && run->size_bytes % sizeof(float) == 0 &&
           end <= parts->code_bytes / SW_UNIT_RECORD_BYTES;
}

static sw_status check_run(const sw_unit_spec *spec, const sw_unit_run *run,
                           const sw_unit_parts *parts, sw_error *err)
{
    size_t target_end, source_end;
    if (run->rank >= parts->world_size ||
        !sw_size_add(run->target_bytes, run->size_bytes, &target_end) ||
        !sw_size_add(run->source_bytes, run->size_bytes, &source_end) ||
        target_end > spec->size_bytes || source_end > parts->slice_bytes)
        SW_FAIL(err, SW_E_INVALID,
                "unit '%s': a run of %zu bytes from byte %zu of rank %zu to byte %zu must lie in "
                "a slice of %zu bytes, a unit of %zu bytes and a world of %zu ranks",
                spec->name, run->size_bytes, run->source_bytes, run->rank, run->target_bytes,
                parts->slice_bytes, spec->size_bytes, parts->world_size);
    if (run->coded && !run_is_coded_well(run, parts))
        SW_FAIL(err, SW_E_INVALID,
                "unit '%s': a coded run of %zu bytes from byte %zu must begin with a block and "
                "have its records in the %zu bytes of codes",
                spec->name, run->size_bytes, run->source_bytes, parts->code_bytes);
    return SW_OK;
}

static uint8_t **copy_table(uint8_t *const *table, size_t count)
{
    uint8_t **copy = malloc((count + 1) * sizeof *copy);
    if (copy)
        memcpy(copy, table, count * sizeof *copy);
    return copy;
}

static sw_status unit_init(unit *made, const sw_unit_spec *spec, sw_error *err)
{
    size_t chunks = sw_page_ring_chunks(spec->size_bytes);
    strncpy(made->name, spec->name, NAME_BYTES - 1);
    made->size_bytes = spec->size_bytes;
    made->run_count = spec->run_count;
    made->runs = malloc((spec->run_count + 1) * sizeof *made->runs);
    made->chunks = malloc((chunks + 1) * sizeof *made->chunks);
    if (!made->runs || !made->chunks)
        SW_FAIL(err, SW_E_MEMORY, "unit '%s': no memory for its tables", spec->name);
    if (spec->run_count)
        memcpy(made->runs, spec->runs, spec->run_count * sizeof *made->runs);
    if (spec->size_bytes == 0)
        return SW_OK;
    made->address = sw_memory_reserve(sw_page_ring_span(spec->size_bytes));
    if (!made->address)
        SW_FAIL(err, SW_E_MEMORY, "unit '%s': no address range of %zu bytes", spec->name,
                spec->size_bytes);
    return SW_OK;
}

sw_status sw_units_create(const sw_unit_parts *parts, const sw_unit_spec *specs, size_t count,
                          size_t warm_bytes, const char *label, sw_units **units, sw_error *err)
{
    size_t chunks = 0;
    sw_status status = SW_OK;
    for (size_t i = 0; i < count; ++i) {
        for (size_t j = 0; j < specs[i].run_count; ++j)
            SW_TRY(check_run(&specs[i], &specs[i].runs[j], parts, err));
        chunks += sw_page_ring_chunks(specs[i].size_bytes);
    }
    sw_units *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for a table of units", label);
    made->ring.fd = made->ring.blank_fd = made->ring.watch = -1;
    made->slices = copy_table(parts->slices, parts->world_size);
    made->codes = parts->codes ? copy_table(parts->codes, parts->world_size) : NULL;
    made->unit = calloc(count + 1, sizeof *made->unit);
    made->file = parts->file;
    made->code_file = parts->code_file;
    made->order = made->file ? calloc(count + 1, GATHERS_A_STEP_MAX * sizeof *made->order) : NULL;
    made->records = made->code_file ? malloc(RECORDS_AT_ONCE * SW_UNIT_RECORD_BYTES) : NULL;
    if (!made->slices || (parts->codes && !made->codes) || !made->unit ||
        (made->file && !made->order) || (made->code_file && !made->records)) {
        status = sw_error_set(err, SW_E_MEMORY, -1, "%s: no memory for %zu units", label, count);
        goto failed;
    }
    SW_TRY_GOTO(status, sw_page_ring_init(&made->ring, chunks, warm_bytes, label, err), failed);
    for (; made->count < count; ++made->count) {
        unit *next = &made->unit[made->count];
        status = unit_init(next, &specs[made->count], err);
        if (status == SW_OK && next->address)
            status = sw_page_ring_blank(&made->ring, next->address, next->size_bytes, NULL, err);
        if (status != SW_OK) {
            made->count++; /* sw_units_destroy releases it with the others */
            goto failed;
        }
    }
    *units = made;
    return SW_OK;
failed:
    sw_units_destroy(made);
    return status;
}

void sw_units_destroy(sw_units *units)
{
    if (!units)
        return;
    for (size_t i = 0; i < units->count; ++i) {
        sw_memory_unmap(units->unit[i].address, sw_page_ring_span(units->unit[i].size_bytes));
        free(units->unit[i].runs);
        free(units->unit[i].chunks);
    }
    sw_page_ring_fini(&units->ring);
    free(units->unit);
    free(units->slices);
    free(units->codes);
    free(units->order);
    free(units->records);
    free(units);
}

size_t sw_units_count(const sw_units *units)
{
    return units->count;
}

sw_shard_state sw_unit_state(const sw_units *units, size_t index)
{
    return units->unit[index].state;
}

uint8_t *sw_unit_address(const sw_units *units, size_t index)
{
    return units->unit[index].address;
}

sw_units_stats sw_units_get_stats(const sw_units *units)
{
    sw_units_stats stats = units->stats;
    stats.most_bytes = units->ring.most_in_use * SW_PAGE_RING_CHUNK_BYTES;
    return stats;
}

static void decode(uint8_t *target, const uint8_t *records, size_t size_bytes)
{
    sw_kernels()->compress->block_dequantize((float *)(void *)target, records,
                                             size_bytes / sizeof(float), SW_UNIT_BLOCK_NUMEL, 8,
                                             false);
}

static const uint8_t *source_of(const sw_units *units, const sw_unit_run *run, bool coded,
                                size_t *size_bytes)
{
    size_t first = run->source_bytes / SW_UNIT_BLOCK_BYTES * SW_UNIT_RECORD_BYTES;
    *size_bytes = coded ? records_of(run->size_bytes) * SW_UNIT_RECORD_BYTES : run->size_bytes;
    return coded ? units->codes[run->rank] + first : units->slices[run->rank] + run->source_bytes;
}

static sw_status decode_file(const sw_units *units, uint8_t *target, const uint8_t *from,
                             size_t size_bytes, sw_error *err)
{
    size_t step = (size_t)RECORDS_AT_ONCE * SW_UNIT_BLOCK_BYTES;
    for (size_t done = 0; done < size_bytes; done += step) {
        size_t part = sw_size_min(step, size_bytes - done),
               bytes = records_of(part) * SW_UNIT_RECORD_BYTES;
        SW_TRY(sw_file_memory_read(units->code_file, units->records, from, bytes, err));
        decode(target + done, units->records, part);
        from += bytes;
    }
    return SW_OK;
}

/* Copy or decode one run, and add the bytes read to *bytes. */
static sw_status fetch(const sw_units *units, uint8_t *target, const sw_unit_run *run,
                       sw_unit_source source, uint64_t *bytes, sw_error *err)
{
    bool coded = source == SW_UNIT_CODES && run->coded;
    size_t read_bytes;
    const uint8_t *from = source_of(units, run, coded, &read_bytes);
    *bytes += read_bytes;
    if (coded && units->code_file)
        return decode_file(units, target, from, run->size_bytes, err);
    if (units->file)
        return sw_file_memory_read(units->file, target, from, run->size_bytes, err);
    if (coded)
        decode(target, from, run->size_bytes);
    else
        sw_copy_streaming(target, from, run->size_bytes);
    return SW_OK;
}

/* Note a gather, and let the disk read the unit that followed it in the last step. */
static void read_ahead(sw_units *units, size_t index, sw_unit_source source)
{
    size_t at = units->at++;
    if (!units->file || at >= units->count * GATHERS_A_STEP_MAX)
        return;
    bool as_before = at + 1 < units->expected && units->order[at] == index;
    units->order[at] = index;
    if (!as_before)
        return;
    const unit *next = &units->unit[units->order[at + 1]];
    for (size_t i = 0; next->state == SW_SHARD_SHARDED && i < next->run_count; ++i) {
        bool coded = source == SW_UNIT_CODES && next->runs[i].coded;
        size_t size_bytes;
        const uint8_t *from = source_of(units, &next->runs[i], coded, &size_bytes);
        sw_file_memory_read_ahead(coded ? units->code_file : units->file, from, size_bytes);
    }
}

void sw_units_end_step(sw_units *units)
{
    units->expected = sw_size_min(units->at, units->count * GATHERS_A_STEP_MAX);
    units->at = 0;
}

/* The pages of a unit that could not be filled go; one that cannot even be made blank keeps them.
 */
static sw_status fail(sw_units *units, unit *it, bool is_mapped, sw_status status)
{
    sw_error second;
    if (is_mapped &&
        sw_page_ring_blank(&units->ring, it->address, it->size_bytes, it->chunks, &second) != SW_OK)
        return status;
    (void)!sw_shard_move(&it->state, SW_SHARD_FAIL, it->name, &second);
    return status;
}

sw_status sw_unit_gather(sw_units *units, size_t index, sw_unit_source source, sw_error *err)
{
    unit *it = &units->unit[index];
    int64_t begin_ns = sw_clock_now_ns();
    SW_TRY(sw_shard_move(&it->state, SW_SHARD_GATHER, it->name, err));
    if (it->address) {
        sw_status status =
            sw_page_ring_map(&units->ring, it->address, it->size_bytes, it->chunks, err);
        if (status != SW_OK)
            return fail(units, it, false, status);
    }
    for (size_t i = 0; i < it->run_count; ++i) {
        const sw_unit_run *run = &it->runs[i];
        sw_status status =
            fetch(units, it->address + run->target_bytes, run, source, &units->stats.bytes, err);
        if (status != SW_OK)
            return fail(units, it, true, status);
    }
    read_ahead(units, index, source);
    units->stats.gathers++;
    units->stats.gather_ns += (uint64_t)(sw_clock_now_ns() - begin_ns);
    return sw_shard_move(&it->state, SW_SHARD_COMPLETE, it->name, err);
}

sw_status sw_unit_release(sw_units *units, size_t index, sw_error *err)
{
    unit *it = &units->unit[index];
    sw_shard_state after = it->state;
    SW_TRY(sw_shard_move(&after, SW_SHARD_RELEASE, it->name, err));
    if (it->address)
        SW_TRY(sw_page_ring_blank(&units->ring, it->address, it->size_bytes, it->chunks, err));
    it->state = after;
    units->stats.releases++;
    return SW_OK;
}

size_t sw_unit_find_write(const sw_units *units, size_t index)
{
    const unit *it = &units->unit[index];
    if (!it->address || it->state != SW_SHARD_SHARDED)
        return SIZE_MAX;
    return sw_page_ring_find_write(&units->ring, it->address, it->size_bytes);
}

sw_status sw_unit_forget_writes(sw_units *units, size_t index, sw_error *err)
{
    const unit *it = &units->unit[index];
    if (!it->address || it->state != SW_SHARD_SHARDED)
        return SW_OK;
    return sw_page_ring_blank(&units->ring, it->address, it->size_bytes, NULL, err);
}
