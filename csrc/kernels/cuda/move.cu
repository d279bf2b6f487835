/* move.cu - CAST, PACK and PUT.
 *
 * Memory bounds CAST and PACK, so a thread loads 64 bytes before it uses the first. Heads and tails
 * that do not lie on a boundary go one by one. All elements do if the two ends are never on
 * boundaries at once (CAST: four loads ahead; PACK: the widest unit that fits both).
 */

/* Cast elements [begin, end) at any alignment. */
SW_RARELY void sw_cast_apart(const sw_cast_args a, sw_u64 begin, sw_u64 end)
{
    const sw_u64 turn = (sw_u64)blockDim.x * 4;
    for (sw_u64 at = begin + blockIdx.x * turn; at < end; at += gridDim.x * turn) {
        const sw_four<false> four = {at + threadIdx.x, blockDim.x, end};
        float x[4];
        four.widen(x, four.load(a.from, a.from_dtype), a.from_dtype);
        for (int k = 0; k < 4; ++k)
            x[k] = x[k] * a.scale;
        four.store(a.to, x, a.to_dtype);
    }
}

template <int TO, int FROM> SW_INLINE void sw_cast_of(const sw_cast_args &a)
{
    enum { AHEAD = FROM == SW_ARG_FLOAT32 ? 4 : 8 };
    const sw_u64 head = sw_head(a.to, 4 * sw_small_bytes(TO), sw_small_bytes(TO), a.numel);
    const char *from = (const char *)a.from + head * sw_small_bytes(FROM);
    char *to = (char *)a.to + head * sw_small_bytes(TO);
    if (!sw_is_wide(from, FROM) || !sw_is_wide(to, TO))
        return sw_cast_apart(a, 0, a.numel);
    const sw_u64 fours = (a.numel - head) / 4, turn = (sw_u64)blockDim.x * AHEAD;
    for (sw_u64 start = blockIdx.x * turn; start < fours; start += gridDim.x * turn) {
        const sw_u64 first = start + threadIdx.x;
        sw_lane16 raw[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const sw_u64 i = first + (sw_u64)k * blockDim.x;
            if (i < fours)
                raw[k] = sw_four<true>{4 * i, 0, 0}.load(from, FROM);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const sw_u64 i = first + (sw_u64)k * blockDim.x;
            const sw_four<true> four = {4 * i, 0, 0};
            float x[4];
            four.widen(x, raw[k], FROM);
            for (int j = 0; j < 4; ++j)
                x[j] = x[j] * a.scale;
            if (i < fours)
                four.store(to, x, TO);
        }
    }
    sw_cast_apart(a, 0, head);
    sw_cast_apart(a, head + 4 * fours, a.numel);
}

template <int TO> SW_INLINE void sw_cast_to(const sw_cast_args &a)
{
    if (a.from_dtype == SW_ARG_FLOAT32)
        sw_cast_of<TO, SW_ARG_FLOAT32>(a);
    else if (a.from_dtype == SW_ARG_BFLOAT16)
        sw_cast_of<TO, SW_ARG_BFLOAT16>(a);
    else
        sw_cast_of<TO, SW_ARG_FLOAT16>(a);
}

SW_KERNEL_OF(4) sw_cast(const sw_cast_args a)
{
    if (a.to_dtype == SW_ARG_FLOAT32)
        sw_cast_to<SW_ARG_FLOAT32>(a);
    else if (a.to_dtype == SW_ARG_BFLOAT16)
        sw_cast_to<SW_ARG_BFLOAT16>(a);
    else
        sw_cast_to<SW_ARG_FLOAT16>(a);
}

/* ---- pack ---- */

enum { SW_PACK_TILE_BYTES = 16384 };

SW_INLINE sw_u64 sw_pack_tiles(const sw_pack_args &a, int i)
{
    return sw_parts(a.segment[i].size_bytes, SW_PACK_TILE_BYTES);
}

/* Copy at most a tile, in units that are aligned at both ends once they are at one; single bytes
 * before the first unit and after the last. */
template <class UNIT> SW_INLINE void sw_pack_units(char *to, const char *from, unsigned size_bytes)
{
    enum { AHEAD = 4 };
    const unsigned head = (unsigned)sw_head(to, sizeof(UNIT), 1, size_bytes);
    const unsigned count = (size_bytes - head) / sizeof(UNIT), covered = count * sizeof(UNIT);
    const UNIT *source = (const UNIT *)(from + head);
    UNIT *target = (UNIT *)(to + head);
    for (unsigned first = threadIdx.x; first < count; first += AHEAD * blockDim.x) {
        UNIT unit[AHEAD];
#pragma unroll
        for (unsigned k = 0; k < AHEAD; ++k)
            if (first + k * blockDim.x < count)
                unit[k] = source[first + k * blockDim.x];
#pragma unroll
        for (unsigned k = 0; k < AHEAD; ++k)
            if (first + k * blockDim.x < count)
                target[first + k * blockDim.x] = unit[k];
    }
    for (unsigned i = threadIdx.x; i < size_bytes - covered; i += blockDim.x) {
        const unsigned at = i < head ? i : i + covered;
        to[at] = from[at];
    }
}

SW_INLINE void sw_pack_tile(const sw_pack_segment &segment, sw_u64 tile)
{
    const sw_u64 start = tile * SW_PACK_TILE_BYTES;
    const unsigned bytes = (unsigned)sw_low(segment.size_bytes - start, SW_PACK_TILE_BYTES);
    char *to = (char *)segment.to + start;
    const char *from = (const char *)segment.from + start;
    const unsigned apart = (unsigned)((sw_u64)to - (sw_u64)from);
    if (apart % 16 == 0)
        sw_pack_units<sw_lane16>(to, from, bytes);
    else if (apart % 4 == 0)
        sw_pack_units<unsigned>(to, from, bytes);
    else if (apart % 2 == 0)
        sw_pack_units<unsigned short>(to, from, bytes);
    else
        sw_pack_units<unsigned char>(to, from, bytes);
}

SW_KERNEL_OF(4) sw_pack(const sw_pack_args a)
{
    sw_u64 first = 0;
    int i = 0;
    if (a.verdict && *(const int *)a.verdict != 0)
        return;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_pack_args, sw_pack_tiles>(a, a.segment_count, i, first, at);
        if (i == a.segment_count)
            return;
        sw_pack_tile(a.segment[i], at - first);
    }
}

SW_KERNEL sw_put(const sw_put_args a)
{
    SW_EACH(i, (sw_u64)a.size_bytes)
    ((unsigned char *)a.to)[i] = a.byte[i];
}
