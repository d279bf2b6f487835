/* fold.cu - FOLD: contributions in rank order, scaled once, rounded once.
 *
 * Idea: a thread keeps its element's sum in a register and meets no other thread, so the bits do not
 * depend on the grid. The comparisons are host/fold_type.h's.
 */

template <class T> SW_INLINE T sw_combine(T a, T b, int op)
{
    if (op == SW_ARG_MIN)
        return (a == a && !(b >= a)) ? b : a;
    if (op == SW_ARG_MAX)
        return (a == a && !(b <= a)) ? b : a;
    return a + b;
}

/* Integers wrap: their sum is that of the unsigned type. */
template <class T, class U> struct sw_whole {
    typedef T value;
    SW_INLINE value load(const void *array, sw_u64 i) { return ((const T *)array)[i]; }
    SW_INLINE void store(void *array, sw_u64 i, value x) { ((T *)array)[i] = x; }
    SW_INLINE value combine(value a, value b, int op)
    {
        return op == SW_ARG_MIN || op == SW_ARG_MAX ? sw_combine(a, b, op) : (T)((U)a + (U)b);
    }
    SW_INLINE value scaled(value x, double) { return x; }
    SW_INLINE value rounded(value x) { return x; }
};

template <class T> struct sw_floating {
    typedef T value;
    SW_INLINE value load(const void *array, sw_u64 i) { return ((const T *)array)[i]; }
    SW_INLINE void store(void *array, sw_u64 i, value x) { ((T *)array)[i] = x; }
    SW_INLINE value combine(value a, value b, int op) { return sw_combine(a, b, op); }
    SW_INLINE value scaled(value x, double scale) { return x * (T)scale; }
    SW_INLINE value rounded(value x) { return x; }
};

template <int DTYPE> struct sw_half {
    typedef float value;
    SW_INLINE value load(const void *array, sw_u64 i) { return sw_load(array, i, DTYPE); }
    SW_INLINE void store(void *array, sw_u64 i, value x) { sw_store(array, i, DTYPE, x); }
    SW_INLINE value combine(value a, value b, int op) { return sw_combine(a, b, op); }
    SW_INLINE value scaled(value x, double scale) { return x * (float)scale; }
    SW_INLINE value rounded(value x)
    {
        return DTYPE == SW_ARG_BFLOAT16 ? sw_bfloat16_widen(sw_bfloat16_narrow(x))
                                        : sw_float16_widen(sw_float16_narrow(x));
    }
};

template <class K> SW_INLINE void sw_fold_of(const sw_fold_args &a, sw_u64 numel)
{
    SW_EACH(i, numel)
    {
        typename K::value sum = {};
        for (int k = 0; k < a.source_count; ++k) {
            const void *from = k == a.own_index
                                   ? a.own
                                   : (const void *)((const char *)a.rest + k * a.stride_bytes);
            typename K::value x = K::load(from, i);
            if (a.addend)
                x = K::rounded(K::combine(K::load(a.addend, i), x, SW_ARG_SUM));
            sum = k == 0 ? x : K::combine(sum, x, a.op);
        }
        K::store(a.to, i, a.op == SW_ARG_MEAN ? K::scaled(sum, a.scale) : sum);
    }
}

SW_KERNEL sw_fold(const sw_fold_args a)
{
    switch (a.dtype) {
    case SW_ARG_FLOAT32:
        return sw_fold_of<sw_floating<float>>(a, a.numel);
    case SW_ARG_FLOAT64:
        return sw_fold_of<sw_floating<double>>(a, a.numel);
    case SW_ARG_FLOAT16:
        return sw_fold_of<sw_half<SW_ARG_FLOAT16>>(a, a.numel);
    case SW_ARG_BFLOAT16:
        return sw_fold_of<sw_half<SW_ARG_BFLOAT16>>(a, a.numel);
    case SW_ARG_INT8:
        return sw_fold_of<sw_whole<signed char, unsigned>>(a, a.numel);
    case SW_ARG_UINT8:
        return sw_fold_of<sw_whole<unsigned char, unsigned>>(a, a.numel);
    case SW_ARG_INT16:
        return sw_fold_of<sw_whole<short, unsigned>>(a, a.numel);
    case SW_ARG_INT32:
        return sw_fold_of<sw_whole<int, unsigned>>(a, a.numel);
    case SW_ARG_INT64:
        return sw_fold_of<sw_whole<long long, sw_u64>>(a, a.numel);
    case SW_ARG_COMPLEX64:
        return sw_fold_of<sw_floating<float>>(a, 2 * a.numel);
    case SW_ARG_COMPLEX128:
        return sw_fold_of<sw_floating<double>>(a, 2 * a.numel);
    }
}
