/* square_sum.cu - NORM: the exact sum of squares, as digits of 32 bits; CLIP: its square root.
 *
 * The elements of a warp nearly always lie in one window of 46 binades: |x| = X * 2^unit with an
 * integer X < 2^46. Two additions of float32 cut X exactly into A * 2^23 + B, with A in [0, 2^23]
 * and |B| <= 2^22. Each thread collects A^2, A B and B^2 in three 64-bit integers. 32 lanes of
 * SW_NORM_MOST elements stay below 2^63; then the warp adds them up and one of its threads adds the
 * sum to the block's digits. Integer additions commute, so neither grid, window nor order shows in
 * the sum.
 *
 * All lanes of a warp have the same window. If the elements that a warp loads at once do not fit,
 * they are added one by one. The window moves to their greatest element if that lies above the
 * window or far below its end. An element that still does not fit (tiny among large ones, infinite,
 * NaN) goes to the digits by itself. So does every float64: its square is an integer of at most 106
 * bits times a power of two and, shifted to a digit's boundary, adds at most 5 digits.
 */

enum {
    SW_NORM_WORDS = SW_ARG_DIGIT_COUNT + 2, /* digits, infinite, nan */
    SW_NORM_AHEAD = 4,    /* vectors of 16 bytes that a thread loads before it uses one */
    SW_NORM_TILE_LANES = 1024, /* vectors of a tile */
    SW_NORM_MOST = 4096,       /* elements of a lane between two flushes */
    SW_SPLIT = 23,        /* A counts 2^23 units */
    SW_UNIT_LEAST = -149, /* from here the constants of the window are normal numbers */
    SW_UNIT_MOST = 80,    /* up to here; elements of 2^126 and more go by themselves */
    SW_UNIT_FIRST = -50,  /* [2^-50, 2^-4): a guess for gradients */
    SW_UNIT_FLOAT16 = -136,
    SW_UNIT_FAR = 4,
};

SW_INLINE sw_u64 sw_norm_tiles(const sw_norm_args &a, int i)
{
    const unsigned bytes = a.dtype == SW_ARG_FLOAT64 ? 8 : sw_small_bytes(a.dtype);
    return sw_parts(a.part[i].numel * bytes, SW_NORM_TILE_LANES * 16);
}

SW_RARELY void sw_add_digits(sw_u64 *digit, sw_u64 high, sw_u64 low, int offset)
{
    int at = offset >> 5, shift = offset & 31;
    sw_u64 top = shift ? high >> (64 - shift) : 0;
    high = shift ? high << shift | low >> (64 - shift) : high;
    low <<= shift;
    const sw_u64 part[5] = {low & 0xffffffffu, low >> 32, high & 0xffffffffu, high >> 32, top};
    for (int k = 0; k < 5; ++k)
        if (part[k])
            atomicAdd(&digit[at + k], part[k]);
}

/* Add mantissa^2 * 2^(2 exponent). */
SW_INLINE void sw_add_square(sw_u64 *digit, sw_u64 mantissa, int exponent)
{
    sw_add_digits(digit, __umul64hi(mantissa, mantissa), mantissa * mantissa,
                  2 * exponent - SW_ARG_LOWEST_EXPONENT);
}

SW_RARELY void sw_add_float(sw_u64 *sum, float x)
{
    unsigned bits = __float_as_uint(x), exponent = (bits >> 23) & 255u, mantissa = bits & 0x7fffffu;
    if (exponent == 255u)
        atomicAdd(&sum[SW_ARG_DIGIT_COUNT + (mantissa ? 1 : 0)], 1ull);
    else if (exponent | mantissa)
        sw_add_square(sum, exponent ? mantissa | 0x800000u : mantissa,
                      (int)(exponent ? exponent : 1u) - 150);
}

SW_INLINE void sw_add_double(sw_u64 *sum, double x)
{
    sw_u64 bits = (sw_u64)__double_as_longlong(x), mantissa = bits & 0xfffffffffffffull;
    int exponent = (int)(bits >> 52) & 2047;
    if (exponent == 2047)
        atomicAdd(&sum[SW_ARG_DIGIT_COUNT + (mantissa ? 1 : 0)], 1ull);
    else if (exponent || mantissa)
        sw_add_square(sum, exponent ? mantissa | 0x10000000000000ull : mantissa,
                      (exponent ? exponent : 1) - 1075);
}

/* ---- a window ---- */

struct sw_window {
    int unit;     /* its least element is 2^unit, and all are multiples of it */
    float split;  /* 2^(unit + 46): |x| + split rounds to a multiple of 2^(unit + 23) */
    float whole;  /* 1.5 * 2^(unit + 23): a rest + whole rounds to a multiple of 2^unit */
    float beyond; /* the end of the window, exclusive */
};

struct sw_squares { /* A^2, A B and B^2; A B in two's complement */
    sw_u64 high, cross, low;
};

/* Elements of a dtype as raw float32 numbers of either sign: value = raw * 2^RAISED. */
template <int DTYPE> struct sw_normed;

template <> struct sw_normed<SW_ARG_FLOAT32> {
    enum { NUMEL = 4, RAISED = 0, MOVES = 1, MARGIN = 1 };
    SW_INLINE float raw(const sw_lane16 &lane, int k)
    {
        return __uint_as_float(lane.word[k]);
    }
};

/* A shorter mantissa leaves more binades above the greatest element. */
template <> struct sw_normed<SW_ARG_BFLOAT16> {
    enum { NUMEL = 8, RAISED = 0, MOVES = 1, MARGIN = 8 };
    SW_INLINE float raw(const sw_lane16 &lane, int k)
    {
        const unsigned word = lane.word[k / 2];
        return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
    }
};

/* The bits, moved to float32's position, are the value times 2^-112, subnormals too. One window
 * holds all of them; infinities and NaN lie beyond. */
template <> struct sw_normed<SW_ARG_FLOAT16> {
    enum { NUMEL = 8, RAISED = 112, MOVES = 0, MARGIN = 0 };
    SW_INLINE float raw(const sw_lane16 &lane, int k)
    {
        const unsigned word = lane.word[k / 2];
        return __uint_as_float(k % 2 ? (word >> 3) & 0x0fffe000u : (word & 0x7fffu) << 13);
    }
};

template <int DTYPE> SW_INLINE sw_window sw_window_of(int unit)
{
    const float split = __uint_as_float((unsigned)(unit + 2 * SW_SPLIT + 127) << 23);
    const float whole = __uint_as_float((unsigned)(unit + SW_SPLIT + 127) << 23 | 0x400000u);
    return {unit, split, whole,
            DTYPE == SW_ARG_FLOAT16 ? __uint_as_float(31u << 23) /* float16's infinity */ : split};
}

/* Return the unit of a window that ends MARGIN binades above these bits. */
template <int DTYPE> SW_INLINE int sw_unit_above(unsigned most)
{
    const int field = most < (1u << 23) ? 1 : (int)(most >> 23);
    const int unit = field - 126 + sw_normed<DTYPE>::MARGIN - 2 * SW_SPLIT;
    return unit < SW_UNIT_LEAST ? SW_UNIT_LEAST : unit > SW_UNIT_MOST ? SW_UNIT_MOST : unit;
}

/* Add x. If x is not in the window, return false and leave undefined sums. */
SW_INLINE bool sw_squares_add(sw_squares &s, float x, const sw_window &w)
{
    const float magnitude = fabsf(x), cut = magnitude + w.split;
    const float rest = magnitude - (cut - w.split), moved = rest + w.whole;
    const int a = (int)(__float_as_uint(cut) - __float_as_uint(w.split));
    const int b = (int)(__float_as_uint(moved) - __float_as_uint(w.whole));
    s.high += (sw_u64)((long long)a * a);
    s.cross += (sw_u64)((long long)a * b);
    s.low += (sw_u64)((long long)b * b);
    return magnitude < w.beyond && moved - w.whole == rest;
}

/* Add the sums of all lanes to the digits. All lanes of a warp call it. */
SW_RARELY void sw_squares_flush(sw_u64 *digit, sw_u64 squares, sw_u64 cross, sw_u64 rest,
                                int exponent)
{
    squares = sw_warp_sum(squares);
    cross = sw_warp_sum(cross);
    rest = sw_warp_sum(rest);
    if (threadIdx.x & 31u)
        return;
    /* squares * 2^46 + cross * 2^24 + rest, in 128 bits */
    sw_u64 high = squares >> 18, low = squares << 46, sum = low + (cross << 24);
    high += (sw_u64)((long long)cross >> 40) + (sum < low ? 1 : 0);
    low = sum + rest;
    high += low < sum ? 1 : 0;
    sw_add_digits(digit, high, low, 2 * exponent - SW_ARG_LOWEST_EXPONENT);
}

/* The sums of a lane and the digits that they go to. */
struct sw_norm_lane {
    sw_u64 *digit; /* the digits of the block */
    sw_squares sums;
    sw_window window;
};

template <int DTYPE> SW_INLINE void sw_norm_flush(sw_norm_lane &lane)
{
    sw_squares_flush(lane.digit, lane.sums.high, lane.sums.cross, lane.sums.low,
                     lane.window.unit + sw_normed<DTYPE>::RAISED);
    lane.sums = {};
}

/* Add vectors first, first + blockDim.x, ... again, since some element of them did not fit. */
template <int DTYPE>
SW_INLINE void sw_norm_turn_again(sw_norm_lane &lane, const void *data, sw_u64 first, sw_u64 lanes)
{
    typedef sw_normed<DTYPE> kind;
    const sw_lane16 *vector = (const sw_lane16 *)data;
    unsigned most = 0;
#pragma unroll 1
    for (sw_u64 k = 0, i = first; k < SW_NORM_AHEAD && i < lanes; ++k, i += blockDim.x) {
        const sw_lane16 loaded = vector[i];
        for (int j = 0; j < kind::NUMEL; ++j) {
            const unsigned bits = __float_as_uint(kind::raw(loaded, j)) & 0x7fffffffu;
            most = bits > most && bits < 0x7f800000u ? bits : most;
        }
    }
    most = sw_warp_most(most);
    const int unit = sw_unit_above<DTYPE>(most);
    const bool above = __uint_as_float(most) >= lane.window.beyond;
    if (kind::MOVES && most && unit != lane.window.unit &&
        (above || unit + SW_UNIT_FAR <= lane.window.unit)) {
        sw_norm_flush<DTYPE>(lane);
        lane.window = sw_window_of<DTYPE>(unit);
    }
#pragma unroll 1
    for (sw_u64 k = 0, i = first; k < SW_NORM_AHEAD && i < lanes; ++k, i += blockDim.x) {
#pragma unroll 1
        for (unsigned j = 0; j < kind::NUMEL; ++j) {
            const float x = sw_load(data, i * kind::NUMEL + j, DTYPE);
            const float raw = kind::RAISED ? x * __uint_as_float((127u - kind::RAISED) << 23) : x;
            sw_squares next = lane.sums;
            if (sw_squares_add(next, raw, lane.window))
                lane.sums = next;
            else
                sw_add_float(lane.digit, x);
        }
    }
}

/* Add the elements of a tile: whole vectors by all warps; with the first tile, the elements before
 * and after the vectors of the array one by one. */
template <int DTYPE>
SW_INLINE void sw_norm_tile(sw_norm_lane &lane, unsigned &collected, const sw_norm_part &part,
                            sw_u64 tile)
{
    typedef sw_normed<DTYPE> kind;
    enum { TURN_NUMEL = SW_NORM_AHEAD * kind::NUMEL };
    const unsigned bytes = 16 / kind::NUMEL, mask = sw_warp_mask(sw_warp_count());
    const sw_u64 head = sw_head(part.data, 16, bytes, part.numel);
    const sw_u64 lanes = (part.numel - head) / kind::NUMEL, begin = tile * SW_NORM_TILE_LANES;
    const sw_lane16 *vector = (const sw_lane16 *)((const char *)part.data + head * bytes);
    const sw_u64 end = sw_low(lanes, begin + SW_NORM_TILE_LANES);
    for (sw_u64 start = begin; start < end; start += (sw_u64)blockDim.x * SW_NORM_AHEAD) {
        const sw_u64 first = start + threadIdx.x;
        sw_lane16 loaded[SW_NORM_AHEAD];
#pragma unroll
        for (int k = 0; k < SW_NORM_AHEAD; ++k) {
            const sw_u64 i = first + (sw_u64)k * blockDim.x;
            loaded[k] = i < end ? vector[i] : sw_lane16{};
        }
        sw_squares next = lane.sums;
        bool fits = true;
#pragma unroll
        for (int k = 0; k < TURN_NUMEL; ++k)
            fits = sw_squares_add(next, kind::raw(loaded[k / kind::NUMEL], k % kind::NUMEL),
                                  lane.window) &&
                   fits; /* && keeps the order: with &= nvcc 13 compares at the end, and spills */
        if (__all_sync(mask, fits))
            lane.sums = next;
        else
            sw_norm_turn_again<DTYPE>(lane, vector, first, end);
        if ((collected += TURN_NUMEL) == SW_NORM_MOST) {
            sw_norm_flush<DTYPE>(lane);
            collected = 0;
        }
    }
    if (tile > 0)
        return;
    const unsigned apart = (unsigned)(part.numel - lanes * kind::NUMEL);
    for (unsigned i = threadIdx.x; i < apart; i += blockDim.x)
        sw_add_float(lane.digit,
                     sw_load(part.data, i < head ? i : i + lanes * kind::NUMEL, DTYPE));
}

template <int DTYPE> SW_INLINE void sw_norm_of(const sw_norm_args &a, sw_u64 *digit)
{
    typedef sw_normed<DTYPE> kind;
    sw_norm_lane lane = {
        digit, {}, sw_window_of<DTYPE>(kind::MOVES ? SW_UNIT_FIRST : SW_UNIT_FLOAT16)};
    unsigned collected = 0;
    sw_u64 first = 0;
    int i = 0;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_norm_args, sw_norm_tiles>(a, a.part_count, i, first, at);
        if (i == a.part_count)
            break;
        sw_norm_tile<DTYPE>(lane, collected, a.part[i], at - first);
    }
    sw_norm_flush<DTYPE>(lane);
}

/* Float64 has no window. */
SW_INLINE void sw_norm_of_doubles(const sw_norm_args &a, sw_u64 *digit)
{
    sw_u64 first = 0;
    int i = 0;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_norm_args, sw_norm_tiles>(a, a.part_count, i, first, at);
        if (i == a.part_count)
            return;
        const sw_u64 begin = (at - first) * SW_NORM_TILE_LANES * 2;
        const sw_u64 end = sw_low(a.part[i].numel, begin + SW_NORM_TILE_LANES * 2);
        for (sw_u64 k = begin + threadIdx.x; k < end; k += blockDim.x)
            sw_add_double(digit, ((const double *)a.part[i].data)[k]);
    }
}

SW_KERNEL_OF(3) sw_norm(const sw_norm_args a)
{
    __shared__ sw_u64 mine[SW_NORM_WORDS];
    sw_u64 *sum = (sw_u64 *)a.sum;
    for (unsigned w = threadIdx.x; w < SW_NORM_WORDS; w += blockDim.x)
        mine[w] = 0;
    __syncthreads();
    if (a.dtype == SW_ARG_FLOAT32)
        sw_norm_of<SW_ARG_FLOAT32>(a, mine);
    else if (a.dtype == SW_ARG_BFLOAT16)
        sw_norm_of<SW_ARG_BFLOAT16>(a, mine);
    else if (a.dtype == SW_ARG_FLOAT16)
        sw_norm_of<SW_ARG_FLOAT16>(a, mine);
    else
        sw_norm_of_doubles(a, mine);
    __syncthreads();
    for (unsigned w = threadIdx.x; w < SW_NORM_WORDS; w += blockDim.x)
        if (mine[w])
            atomicAdd(&sum[w], mine[w]);
    if (blockIdx.x == 0) /* additions: the bound of a digit's value */
        for (int i = threadIdx.x; i < a.part_count; i += blockDim.x)
            atomicAdd(&sum[SW_NORM_WORDS], a.part[i].numel);
}

/* ---- clip ---- */

/* sw_norm_value of carried digits, operation by operation. */
SW_INLINE double sw_root(const sw_u64 *digit)
{
    int top = SW_ARG_DIGIT_COUNT - 1;
    while (top > 2 && digit[top] == 0)
        --top;
    const sw_u64 head = digit[top], low = digit[top - 1] << 32 | digit[top - 2];
    int shift = 0;
    while (shift < 64 && (head << shift) >> 63 == 0)
        ++shift;
    sw_u64 bits = low;
    bool sticky = false;
    if (shift < 64) {
        bits = head << shift | low >> (64 - shift);
        sticky = (low << shift) != 0;
    }
    for (int i = 0; i < top - 2; ++i)
        sticky |= digit[i] != 0;
    int exponent = SW_ARG_LOWEST_EXPONENT + 32 * top - shift;
    double square = (double)(bits | (sticky ? 1 : 0));
    if (exponent % 2 != 0) {
        square *= 2.0;
        --exponent;
    }
    /* 2^(exponent / 2) in two factors: a root may be subnormal, where one rounding is enough */
    const int half = exponent / 2, most = half < -1000 ? half + 1000 : 0;
    const double root = sqrt(square) * __longlong_as_double((long long)(half - most + 1023) << 52);
    return most ? root * __longlong_as_double((long long)(most + 1023) << 52) : root;
}

SW_KERNEL sw_clip(const sw_clip_args a)
{
    __shared__ long long digit[SW_NORM_WORDS];
    long long *sum = (long long *)a.sum;
    for (unsigned w = threadIdx.x; w < SW_NORM_WORDS; w += blockDim.x)
        digit[w] = sum[w];
    __syncthreads();
    if (threadIdx.x == 0) {
        long long carry = 0;
        for (int i = 0; i + 1 < SW_ARG_DIGIT_COUNT; ++i) {
            const long long value = digit[i] + carry;
            digit[i] = value & 0xffffffffll;
            carry = (value - digit[i]) / (1ll << 32);
        }
        digit[SW_ARG_DIGIT_COUNT - 1] += carry;
        sum[SW_NORM_WORDS] = 0; /* additions since the carry */
        if (a.norm) {
            const double least = __longlong_as_double(0x3eb0c6f7a0b5ed8dll); /* 1e-6 */
            const double infinity = __longlong_as_double(0x7ff0000000000000ll);
            double norm = digit[SW_ARG_DIGIT_COUNT] ? infinity : sw_root((const sw_u64 *)digit);
            if (digit[SW_ARG_DIGIT_COUNT + 1])
                norm = __longlong_as_double(0x7ff8000000000000ll);
            const double factor = a.max_norm / (norm + least);
            *(float *)a.norm = (float)norm;
            *(float *)a.factor = factor >= 1.0 ? 1.0f : (float)factor;
        }
    }
    __syncthreads();
    for (unsigned w = threadIdx.x; w < SW_ARG_DIGIT_COUNT; w += blockDim.x)
        sum[w] = digit[w];
}
