/* kernels.c - the kernel table in force, and the operations defined on each dtype.
 *
 * The table is one atomic pointer, empty until the first call of sw_kernels(). That call stores the
 * best table by compare-and-exchange, so that it never overwrites a table forced meanwhile.
 */
#include "kernels/kernels.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "kernels/host/tables.h"
#include "platform/cpu.h"

enum { TABLE_COUNT_MAX = 3 };

static _Atomic(const sw_kernel_table *) in_force; /* borrowed from static storage */

/* Count the tables that the processor runs. */
static size_t available_count(void)
{
    static atomic_size_t kept;
    size_t count = atomic_load_explicit(&kept, memory_order_relaxed);
    if (count == 0) {
        count = 1;
#if defined(__x86_64__)
        count += sw_cpu_has_avx2_f16c_fma();
        count += sw_cpu_has_avx512(); /* AVX-512 implies AVX2 */
#endif
        atomic_store_explicit(&kept, count, memory_order_relaxed);
    }
    return count;
}

size_t sw_kernels_available(const sw_kernel_table **tables, size_t capacity)
{
    static const sw_kernel_table *const all[TABLE_COUNT_MAX] = {
        &sw_kernels_baseline,
#if defined(__x86_64__)
        &sw_kernels_avx2,
        &sw_kernels_avx512,
#endif
    };
    size_t count = available_count();
    for (size_t i = 0; tables && i < count && i < capacity; ++i)
        tables[i] = all[i];
    return count;
}

const sw_kernel_table *sw_kernels(void)
{
    const sw_kernel_table *table = atomic_load_explicit(&in_force, memory_order_acquire);
    if (!table) {
        const sw_kernel_table *tables[TABLE_COUNT_MAX];
        const sw_kernel_table *best = tables[sw_kernels_available(tables, TABLE_COUNT_MAX) - 1];
        if (atomic_compare_exchange_strong(&in_force, &table, best))
            table = best;
    }
    return table;
}

/* Write the names as "baseline, avx2". */
static void join_names(const sw_kernel_table *const *tables, size_t count, char *out, size_t bytes)
{
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < count && used < bytes; ++i)
        used += (size_t)snprintf(out + used, bytes - used, "%s%s", i ? ", " : "", tables[i]->name);
}

sw_status sw_kernels_force(const char *name, sw_error *err)
{
    const sw_kernel_table *tables[TABLE_COUNT_MAX];
    size_t count = sw_kernels_available(tables, TABLE_COUNT_MAX);
    char names[64];
    for (size_t i = 0; i < count; ++i) {
        if (name ? strcmp(tables[i]->name, name) == 0 : i + 1 == count) {
            atomic_store_explicit(&in_force, tables[i], memory_order_release);
            return SW_OK;
        }
    }
    join_names(tables, count, names, sizeof names);
    SW_FAIL(err, SW_E_INVALID, "sw_kernels_force: name must be one of %s, not '%s'", names, name);
}

static bool is_integer(sw_dtype dtype)
{
    return dtype >= SW_DTYPE_INT8 && dtype <= SW_DTYPE_INT64;
}

static bool is_complex(sw_dtype dtype)
{
    return dtype == SW_DTYPE_COMPLEX64 || dtype == SW_DTYPE_COMPLEX128;
}

sw_status sw_redop_check(sw_redop op, sw_dtype dtype, sw_error *err)
{
    if ((unsigned)op >= (unsigned)SW_REDOP_COUNT)
        SW_FAIL(err, SW_E_INVALID, "reduce: op must be in [0, %d), not %d", (int)SW_REDOP_COUNT,
                (int)op);
    if (sw_dtype_size_bytes(dtype) == 0 || dtype >= SW_DTYPE_BOOL)
        SW_FAIL(err, SW_E_INVALID, "reduce: %s is not defined on dtype %s, only on numbers",
                sw_redop_name(op), sw_dtype_name(dtype));
    if (op == SW_REDOP_MEAN && is_integer(dtype))
        SW_FAIL(err, SW_E_INVALID, "reduce: mean is not defined on dtype %s; use sum, min or max",
                sw_dtype_name(dtype));
    if ((op == SW_REDOP_MIN || op == SW_REDOP_MAX) && is_complex(dtype))
        SW_FAIL(err, SW_E_INVALID, "reduce: %s is not defined on dtype %s; use sum or mean",
                sw_redop_name(op), sw_dtype_name(dtype));
    return SW_OK;
}

const char *sw_redop_name(sw_redop op)
{
    static const char *const names[SW_REDOP_COUNT] = {
        [SW_REDOP_SUM] = "sum",
        [SW_REDOP_MEAN] = "mean",
        [SW_REDOP_MIN] = "min",
        [SW_REDOP_MAX] = "max",
    };
    return (unsigned)op < (unsigned)SW_REDOP_COUNT ? names[op] : "invalid";
}
