/* fold_type.h - the fold of one arithmetic type, which fold_body.h includes once per type.
 *
 * Expects, and undefines at the end:
 *   FOLD_T          the element type, which is the accumulation type too
 *   FOLD_NAME(f)    f with the type's suffix
 *   FOLD_ADD(a, b)  the sum as FOLD_T
 *   FOLD_FLOATING   1 for floating types: NaN and MEAN exist, folds of 2 and 3 stay in registers
 *
 * Pointers here are equal or disjoint, so an iteration meets only its own element: FOLD_LANES tells
 * the vectoriser. `restrict` would be wrong, since a destination may be a source.
 *
 * Left out: non-temporal stores and prefetches. In place, the lines to store are those just loaded.
 * On 25 to 100 MB, non-temporal stores measured a fifth slower and more, prefetches no faster.
 */

#if FOLD_FLOATING
#define FOLD_IS_NUMBER(a) ((a) == (a))
#else
#define FOLD_IS_NUMBER(a) 1
#endif

/* out[i] = a[i] op b[i]. A NaN in a stays; a NaN in b is taken (b >= a fails). The earlier of two
 * equal values stays, so -0 and +0 do not depend on the instruction set either. */
static void FOLD_NAME(combine)(FOLD_T *out, const FOLD_T *a, const FOLD_T *b, size_t count,
                               sw_redop op)
{
    if (op == SW_REDOP_MIN) {
        FOLD_LANES
        for (size_t i = 0; i < count; ++i)
            out[i] = (FOLD_IS_NUMBER(a[i]) & !(b[i] >= a[i])) ? b[i] : a[i];
    } else if (op == SW_REDOP_MAX) {
        FOLD_LANES
        for (size_t i = 0; i < count; ++i)
            out[i] = (FOLD_IS_NUMBER(a[i]) & !(b[i] <= a[i])) ? b[i] : a[i];
    } else {
        FOLD_LANES
        for (size_t i = 0; i < count; ++i)
            out[i] = FOLD_ADD(a[i], b[i]);
    }
}

#if FOLD_FLOATING
static void FOLD_NAME(scale)(FOLD_T *out, size_t count, FOLD_T factor)
{
    for (size_t i = 0; i < count; ++i)
        out[i] *= factor;
}

/* The folds of two and of three sources, the most frequent ones, are bound by memory: one pass
 * loads each element once and stores it once per destination. A missing destination repeats an
 * earlier one, which costs a store to a line that is in the cache. */
static void FOLD_NAME(fold2)(void *const *destination, int destination_count,
                             const void *const *source, size_t numel, FOLD_T factor)
{
    const FOLD_T *s0 = source[0], *s1 = source[1];
    FOLD_T *d0 = destination[0], *d1 = destination[destination_count - 1];
    FOLD_LANES
    for (size_t i = 0; i < numel; ++i) {
        FOLD_T result = (s0[i] + s1[i]) * factor;
        d0[i] = result;
        d1[i] = result;
    }
}

static void FOLD_NAME(fold3)(void *const *destination, int destination_count,
                             const void *const *source, size_t numel, FOLD_T factor)
{
    const FOLD_T *s0 = source[0], *s1 = source[1], *s2 = source[2];
    FOLD_T *d0 = destination[0], *d1 = destination[destination_count / 2];
    FOLD_T *d2 = destination[destination_count - 1];
    FOLD_LANES
    for (size_t i = 0; i < numel; ++i) {
        FOLD_T result = ((s0[i] + s1[i]) + s2[i]) * factor;
        d0[i] = result;
        d1[i] = result;
        d2[i] = result;
    }
}

/* Fold two or three sources; return 0 for any other count. SUM multiplies by one, which changes no
 * value. */
static int FOLD_NAME(fold_few)(void *const *destination, int destination_count,
                               const void *const *source, int source_count, size_t numel,
                               FOLD_T factor, sw_redop op)
{
    FOLD_T multiplier = op == SW_REDOP_MEAN ? factor : (FOLD_T)1;
    if ((op != SW_REDOP_SUM && op != SW_REDOP_MEAN) || destination_count < 1 ||
        destination_count > source_count)
        return 0;
    if (source_count == 2)
        FOLD_NAME(fold2)(destination, destination_count, source, numel, multiplier);
    else if (source_count == 3)
        FOLD_NAME(fold3)(destination, destination_count, source, numel, multiplier);
    else
        return 0;
    return 1;
}
#endif

static void FOLD_NAME(fold)(void *const *destination, int destination_count,
                            const void *const *source, int source_count, size_t numel, double scale,
                            sw_redop op)
{
    enum { BLOCK_NUMEL = FOLD_BLOCK_BYTES / sizeof(FOLD_T) };
    FOLD_T sum[BLOCK_NUMEL];
#if FOLD_FLOATING
    if (FOLD_NAME(fold_few)(destination, destination_count, source, source_count, numel,
                            (FOLD_T)scale, op))
        return;
#else
    (void)scale;
#endif
    for (size_t start = 0; start < numel; start += BLOCK_NUMEL) {
        size_t count = numel - start < BLOCK_NUMEL ? numel - start : BLOCK_NUMEL;
        const FOLD_T *first = (const FOLD_T *)source[0] + start;
        if (source_count == 1)
            memcpy(sum, first, count * sizeof(FOLD_T));
        for (int k = 1; k < source_count; ++k)
            FOLD_NAME(combine)(sum, k == 1 ? first : sum, (const FOLD_T *)source[k] + start, count,
                               op);
#if FOLD_FLOATING
        if (op == SW_REDOP_MEAN)
            FOLD_NAME(scale)(sum, count, (FOLD_T)scale);
#endif
        for (int k = 0; k < destination_count; ++k)
            memcpy((FOLD_T *)destination[k] + start, sum, count * sizeof(FOLD_T));
    }
}

#undef FOLD_T
#undef FOLD_NAME
#undef FOLD_ADD
#undef FOLD_FLOATING
#undef FOLD_IS_NUMBER
