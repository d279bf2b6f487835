/* fold.cu - FOLD: contributions in rank order, scaled once, rounded once.
 *
 * A thread keeps the sums of its elements in registers and exchanges nothing with other threads, so
 * the bits do not depend on the grid. It takes two vectors of 16 bytes and loads those of three or
 * four contributions before it uses one. Elements before the first boundary and after the last go
 * one by one. All elements do, four loads ahead, if some array is never on a boundary when `to` is.
 * The comparisons are host/fold_type.h's.
 */

template <class T> SW_INLINE T sw_combine(T a, T b, int op)
{
    if (op == SW_ARG_MIN)
        return (a == a && !(b >= a)) ? b : a;
    if (op == SW_ARG_MAX)
        return (a == a && !(b <= a)) ? b : a;
    return a + b;
}

/* An element of 1, 2, 4 or 8 bytes as raw bits: alone, or number j of a vector. */
template <int BYTES> struct sw_raw;
template <> struct sw_raw<1> {
    typedef unsigned char type;
    SW_INLINE type get(const sw_lane16 &lane, int j)
    {
        return (type)(lane.word[j / 4] >> 8 * (j % 4));
    }
    SW_INLINE void put(sw_lane16 &lane, int j, type bits)
    {
        lane.word[j / 4] |= (unsigned)bits << 8 * (j % 4);
    }
};
template <> struct sw_raw<2> {
    typedef unsigned short type;
    SW_INLINE type get(const sw_lane16 &lane, int j)
    {
        return (type)(lane.word[j / 2] >> 16 * (j % 2));
    }
    SW_INLINE void put(sw_lane16 &lane, int j, type bits)
    {
        lane.word[j / 2] |= (unsigned)bits << 16 * (j % 2);
    }
};
template <> struct sw_raw<4> {
    typedef unsigned type;
    SW_INLINE type get(const sw_lane16 &lane, int j)
    {
        return lane.word[j];
    }
    SW_INLINE void put(sw_lane16 &lane, int j, type bits)
    {
        lane.word[j] = bits;
    }
};
template <> struct sw_raw<8> {
    typedef sw_u64 type;
    SW_INLINE type get(const sw_lane16 &lane, int j)
    {
        return lane.word[2 * j] | (sw_u64)lane.word[2 * j + 1] << 32;
    }
    SW_INLINE void put(sw_lane16 &lane, int j, type bits)
    {
        lane.word[2 * j] = (unsigned)bits;
        lane.word[2 * j + 1] = (unsigned)(bits >> 32);
    }
};

/* Kinds of elements: their addition, and the number of vectors whose sums a thread keeps (EACH).
 * Integers wrap: they are added as the unsigned type. */
template <class T, class U> struct sw_whole {
    typedef T value;
    enum { BYTES = sizeof(T), EACH = sizeof(T) < 4 ? 1 : 2 };
    SW_INLINE value widen(typename sw_raw<BYTES>::type bits)
    {
        return (T)bits;
    }
    SW_INLINE typename sw_raw<BYTES>::type narrow(value x)
    {
        return (typename sw_raw<BYTES>::type)x;
    }
    SW_INLINE value combine(value a, value b, int op)
    {
        return op == SW_ARG_MIN || op == SW_ARG_MAX ? sw_combine(a, b, op) : (T)((U)a + (U)b);
    }
    SW_INLINE value scaled(value x, double)
    {
        return x;
    }
    SW_INLINE value rounded(value x)
    {
        return x;
    }
};

struct sw_single {
    typedef float value;
    enum { BYTES = 4, EACH = 2 };
    SW_INLINE value widen(unsigned bits)
    {
        return __uint_as_float(bits);
    }
    SW_INLINE unsigned narrow(value x)
    {
        return __float_as_uint(x);
    }
    SW_INLINE value combine(value a, value b, int op)
    {
        return sw_combine(a, b, op);
    }
    SW_INLINE value scaled(value x, double scale)
    {
        return x * (float)scale;
    }
    SW_INLINE value rounded(value x)
    {
        return x;
    }
};

struct sw_double {
    typedef double value;
    enum { BYTES = 8, EACH = 2 };
    SW_INLINE value widen(sw_u64 bits)
    {
        return __longlong_as_double((long long)bits);
    }
    SW_INLINE sw_u64 narrow(value x)
    {
        return (sw_u64)__double_as_longlong(x);
    }
    SW_INLINE value combine(value a, value b, int op)
    {
        return sw_combine(a, b, op);
    }
    SW_INLINE value scaled(value x, double scale)
    {
        return x * scale;
    }
    SW_INLINE value rounded(value x)
    {
        return x;
    }
};

template <int DTYPE> struct sw_half {
    typedef float value;
    enum { BYTES = 2, EACH = 2 };
    SW_INLINE value widen(unsigned short bits)
    {
        return DTYPE == SW_ARG_BFLOAT16 ? sw_bfloat16_widen(bits) : sw_float16_widen(bits);
    }
    SW_INLINE unsigned short narrow(value x)
    {
        return DTYPE == SW_ARG_BFLOAT16 ? sw_bfloat16_narrow(x) : sw_float16_narrow(x);
    }
    SW_INLINE value combine(value a, value b, int op)
    {
        return sw_combine(a, b, op);
    }
    SW_INLINE value scaled(value x, double scale)
    {
        return x * (float)scale;
    }
    SW_INLINE value rounded(value x)
    {
        return widen(narrow(x));
    }
};

/* COUNT sums of a thread. The operation is tested once for all of them. */
template <class K, int COUNT> struct sw_sums {
    typename K::value sum[COUNT];

    template <int OP> SW_METHOD void combine(const typename K::value *x)
    {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            sum[j] = K::combine(sum[j], x[j], OP);
    }

    /* Add contribution k. */
    SW_METHOD void add(const sw_fold_args &a, int k, const typename K::value *x)
    {
        if (k == 0) {
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
                sum[j] = x[j];
        } else if (a.op == SW_ARG_MIN) {
            combine<SW_ARG_MIN>(x);
        } else if (a.op == SW_ARG_MAX) {
            combine<SW_ARG_MAX>(x);
        } else {
            combine<SW_ARG_SUM>(x);
        }
    }

    SW_METHOD typename K::value scaled(const sw_fold_args &a, int j) const
    {
        return a.op == SW_ARG_MEAN ? K::scaled(sum[j], a.scale) : sum[j];
    }

    SW_METHOD typename sw_raw<K::BYTES>::type result(const sw_fold_args &a, int j) const
    {
        return K::narrow(scaled(a, j));
    }
};

SW_INLINE const char *sw_fold_source(const sw_fold_args &a, int k)
{
    return k == a.own_index ? (const char *)a.own : (const char *)a.rest + k * a.stride_bytes;
}

/* Fold elements [0, head) and [head + covered, numel), four elements a block apart. */
template <class K>
SW_RARELY void sw_fold_apart(const sw_fold_args a, sw_u64 numel, sw_u64 head, sw_u64 covered)
{
    typedef typename sw_raw<K::BYTES>::type raw_type;
    const sw_u64 count = numel - covered, turn = (sw_u64)blockDim.x * 4;
    for (sw_u64 start = blockIdx.x * turn; start < count; start += gridDim.x * turn) {
        sw_u64 at[4];
        sw_sums<K, 4> sums = {};
        typename K::value addend[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const sw_u64 i = start + threadIdx.x + j * blockDim.x;
            at[j] = i < head ? i : i + covered;
            if (a.addend && at[j] < numel)
                addend[j] = K::widen(((const raw_type *)a.addend)[at[j]]);
        }
        for (int k = 0; k < a.source_count; ++k) {
            const raw_type *from = (const raw_type *)sw_fold_source(a, k);
            raw_type raw[4] = {};
            typename K::value x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (at[j] < numel)
                    raw[j] = from[at[j]];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[j] = K::widen(raw[j]);
                if (a.addend)
                    x[j] = K::rounded(K::combine(addend[j], x[j], SW_ARG_SUM));
            }
            sums.add(a, k, x);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (at[j] >= numel)
                continue;
            if (a.widens)
                ((typename K::value *)a.to)[at[j]] = sums.scaled(a, j);
            else
                ((raw_type *)a.to)[at[j]] = sums.result(a, j);
        }
    }
}

/* Fold vectors [0, vectors) from `head` bytes on in every array. */
template <class K, bool ADDS>
SW_INLINE void sw_fold_vectors(const sw_fold_args &a, sw_u64 head, sw_u64 vectors)
{
    typedef sw_raw<K::BYTES> raw;
    enum { NUMEL = 16 / K::BYTES, EACH = ADDS ? 1 : K::EACH };
    enum { AHEAD = K::BYTES == 1 ? 2 : ADDS || K::BYTES == 2 ? 3 : 4 }; /* as registers allow */
    const sw_u64 turn = (sw_u64)blockDim.x * EACH;
    for (sw_u64 start = blockIdx.x * turn; start < vectors; start += gridDim.x * turn) {
        const sw_u64 first = start + threadIdx.x;
        sw_sums<K, NUMEL> sums[EACH];
        sw_lane16 addend[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (ADDS && first + e * blockDim.x < vectors)
                addend[e] =
                    ((const sw_lane16 *)((const char *)a.addend + head))[first + e * blockDim.x];
#pragma unroll 1
        for (int begin = 0; begin < a.source_count; begin += AHEAD) {
            sw_lane16 lane[AHEAD][EACH];
#pragma unroll
            for (int s = 0; s < AHEAD; ++s) {
                const sw_lane16 *from = (const sw_lane16 *)(sw_fold_source(a, begin + s) + head);
#pragma unroll
                for (int e = 0; e < EACH; ++e)
                    if (begin + s < a.source_count && first + e * blockDim.x < vectors)
                        lane[s][e] = from[first + e * blockDim.x];
            }
#pragma unroll
            for (int s = 0; s < AHEAD; ++s) {
                if (begin + s == a.source_count)
                    break;
#pragma unroll
                for (int e = 0; e < EACH; ++e) {
                    typename K::value x[NUMEL];
#pragma unroll
                    for (int j = 0; j < NUMEL; ++j) {
                        x[j] = K::widen(raw::get(lane[s][e], j));
                        if (ADDS)
                            x[j] = K::rounded(
                                K::combine(K::widen(raw::get(addend[e], j)), x[j], SW_ARG_SUM));
                    }
                    sums[e].add(a, begin + s, x);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            sw_lane16 lane = {};
#pragma unroll
            for (int j = 0; j < NUMEL; ++j)
                raw::put(lane, j, sums[e].result(a, j));
            if (first + e * blockDim.x < vectors)
                sw_put16((sw_lane16 *)((char *)a.to + head) + first + e * blockDim.x, lane);
        }
    }
}

/* Report if all arrays that are read lie on boundaries when `to` does, and have its elements. */
SW_INLINE bool sw_fold_is_wide(const sw_fold_args &a)
{
    const sw_u64 to = (sw_u64)a.to;
    if (a.widens)
        return false;
    sw_u64 apart = a.source_count > 1 ? a.stride_bytes : 0;
    apart |= a.addend ? (sw_u64)a.addend - to : 0;
    apart |= a.own_index >= 0 ? (sw_u64)a.own - to : 0;
    apart |= a.source_count > 1 || a.own_index < 0 ? (sw_u64)a.rest - to : 0;
    return apart % 16 == 0;
}

template <class K> SW_INLINE void sw_fold_of(const sw_fold_args &a, sw_u64 numel)
{
    enum { NUMEL = 16 / K::BYTES };
    const bool is_wide = sw_fold_is_wide(a);
    const sw_u64 head = is_wide ? sw_head(a.to, 16, K::BYTES, numel) : 0;
    const sw_u64 vectors = is_wide ? (numel - head) / NUMEL : 0;
    if (a.addend)
        sw_fold_vectors<K, true>(a, head * K::BYTES, vectors);
    else
        sw_fold_vectors<K, false>(a, head * K::BYTES, vectors);
    sw_fold_apart<K>(a, numel, head, vectors * NUMEL);
}

SW_KERNEL_OF(3) sw_fold(const sw_fold_args a)
{
    const bool is_complex = a.dtype == SW_ARG_COMPLEX64 || a.dtype == SW_ARG_COMPLEX128;
    const sw_u64 numel = is_complex ? 2 * a.numel : a.numel;
    switch (a.dtype) {
    case SW_ARG_FLOAT32:
    case SW_ARG_COMPLEX64:
        return sw_fold_of<sw_single>(a, numel);
    case SW_ARG_FLOAT64:
    case SW_ARG_COMPLEX128:
        return sw_fold_of<sw_double>(a, numel);
    case SW_ARG_FLOAT16:
        return sw_fold_of<sw_half<SW_ARG_FLOAT16>>(a, numel);
    case SW_ARG_BFLOAT16:
        return sw_fold_of<sw_half<SW_ARG_BFLOAT16>>(a, numel);
    case SW_ARG_INT8:
        return sw_fold_of<sw_whole<signed char, unsigned>>(a, numel);
    case SW_ARG_UINT8:
        return sw_fold_of<sw_whole<unsigned char, unsigned>>(a, numel);
    case SW_ARG_INT16:
        return sw_fold_of<sw_whole<short, unsigned>>(a, numel);
    case SW_ARG_INT32:
        return sw_fold_of<sw_whole<int, unsigned>>(a, numel);
    case SW_ARG_INT64:
        return sw_fold_of<sw_whole<long long, sw_u64>>(a, numel);
    }
}
