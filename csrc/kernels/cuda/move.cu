/* move.cu - CAST, PACK and PUT.
 *
 * Memory bounds CAST and PACK, so a thread loads 64 bytes before it uses the first. Heads and tails
 * that do not lie on a boundary go one by one. All elements do if the two ends are never on
 * boundaries at once (CAST: four loads ahead; PACK: the widest unit that fits both).
 */

enum { SW_MOVE_TILE_BYTES = 16384 }; /* of the source */

/* ---- cast ---- */

/* Elements [begin, end) at any address. */
SW_RARELY void sw_cast_apart(void *to, int to_dtype, const void *from, int from_dtype,
                             unsigned begin, unsigned end, float scale)
{
    for (unsigned first = begin + threadIdx.x; first < end; first += 4 * blockDim.x) {
        const sw_four<false> four = {first, blockDim.x, end};
        float x[4];
        four.widen(x, four.load(from, from_dtype), from_dtype);
        for (int k = 0; k < 4; ++k)
            x[k] = x[k] * scale;
        four.store(to, x, to_dtype);
    }
}

/* Four elements of an array as they lie: one access. */
template <int DTYPE> struct sw_raw_four {
    unsigned word[DTYPE == SW_ARG_FLOAT32 ? 4 : 2];

    SW_METHOD void load(const char *array, sw_u64 i)
    {
        if constexpr (DTYPE == SW_ARG_FLOAT32) {
            const sw_lane16 lane = ((const sw_lane16 *)array)[i];
#pragma unroll
            for (int w = 0; w < 4; ++w)
                word[w] = lane.word[w];
        } else {
            const sw_lane8 lane = ((const sw_lane8 *)array)[i];
            word[0] = lane.word[0];
            word[1] = lane.word[1];
        }
    }
    SW_METHOD float widen(int k) const
    {
        if constexpr (DTYPE == SW_ARG_FLOAT32)
            return __uint_as_float(word[k]);
        const unsigned short half = (unsigned short)(word[k / 2] >> 16 * (k % 2));
        return DTYPE == SW_ARG_BFLOAT16 ? sw_bfloat16_widen(half) : sw_float16_widen(half);
    }
};

/* `fours` times four elements, on boundaries at both ends. */
template <int TO, int FROM>
SW_INLINE void sw_cast_fours(char *to, const char *from, sw_u64 fours, float scale)
{
    enum { AHEAD = FROM == SW_ARG_FLOAT32 ? 4 : 8 };
    for (sw_u64 first = threadIdx.x; first < fours; first += AHEAD * blockDim.x) {
        sw_raw_four<FROM> raw[AHEAD] = {};
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const sw_u64 i = first + (sw_u64)k * blockDim.x;
            if (i < fours)
                raw[k].load(from, i);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const sw_u64 i = first + (sw_u64)k * blockDim.x;
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                x[j] = raw[k].widen(j) * scale;
            if (i < fours)
                sw_four<true>{4 * i, 0, 0}.store(to, x, TO);
        }
    }
}

/* At most SW_MOVE_TILE_BYTES of `from`, by a block of threads. */
template <int TO, int FROM>
SW_INLINE void sw_cast_of(char *to, const char *from, unsigned numel, float scale)
{
    const unsigned head = (unsigned)sw_head(to, 4 * sw_small_bytes(TO), sw_small_bytes(TO), numel);
    const unsigned fours = (numel - head) / 4;
    if (!sw_is_wide(from + head * sw_small_bytes(FROM), FROM) ||
        !sw_is_wide(to + head * sw_small_bytes(TO), TO))
        return sw_cast_apart(to, TO, from, FROM, 0, numel, scale);
    sw_cast_apart(to, TO, from, FROM, 0, head, scale);
    sw_cast_apart(to, TO, from, FROM, head + 4 * fours, numel, scale);
    sw_cast_fours<TO, FROM>(to + head * sw_small_bytes(TO), from + head * sw_small_bytes(FROM),
                            fours, scale);
}

template <int TO>
SW_INLINE void sw_cast_to(char *to, const char *from, int from_dtype, unsigned numel, float scale)
{
    if (from_dtype == SW_ARG_FLOAT32)
        sw_cast_of<TO, SW_ARG_FLOAT32>(to, from, numel, scale);
    else if (from_dtype == SW_ARG_BFLOAT16)
        sw_cast_of<TO, SW_ARG_BFLOAT16>(to, from, numel, scale);
    else
        sw_cast_of<TO, SW_ARG_FLOAT16>(to, from, numel, scale);
}

/* Tile number `tile` of an array. */
SW_INLINE void sw_cast_tile(void *array_to, const void *array_from, sw_u64 numel, float scale,
                            int to_dtype, int from_dtype, sw_u64 tile)
{
    const unsigned most = SW_MOVE_TILE_BYTES / sw_small_bytes(from_dtype);
    const sw_u64 start = tile * most;
    char *to = (char *)array_to + start * sw_small_bytes(to_dtype);
    const char *from = (const char *)array_from + start * sw_small_bytes(from_dtype);
    const unsigned count = (unsigned)sw_low(numel - start, most);
    if (to_dtype == SW_ARG_FLOAT32)
        sw_cast_to<SW_ARG_FLOAT32>(to, from, from_dtype, count, scale);
    else if (to_dtype == SW_ARG_BFLOAT16)
        sw_cast_to<SW_ARG_BFLOAT16>(to, from, from_dtype, count, scale);
    else
        sw_cast_to<SW_ARG_FLOAT16>(to, from, from_dtype, count, scale);
}

SW_KERNEL_OF(4) sw_cast(const sw_cast_args a)
{
    const sw_u64 tiles = sw_parts(a.numel * sw_small_bytes(a.from_dtype), SW_MOVE_TILE_BYTES);
    for (sw_u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x)
        sw_cast_tile(a.to, a.from, a.numel, a.scale, a.to_dtype, a.from_dtype, tile);
}

/* ---- pack ---- */

/* Each piece has tiles of its own. */
SW_INLINE sw_u64 sw_pack_tiles(const sw_pack_args &a, int i)
{
    const sw_pack_segment &segment = a.segment[i];
    if (segment.piece_count == 0)
        return sw_parts(segment.size_bytes, SW_MOVE_TILE_BYTES);
    return segment.piece_count * sw_parts(segment.piece_bytes, SW_MOVE_TILE_BYTES);
}

/* Return the range of a segment in which tile `tile` lies, and change `tile` to its number there. */
SW_INLINE sw_pack_segment sw_pack_range(const sw_pack_segment &segment, sw_u64 &tile)
{
    sw_pack_segment range = segment;
    if (segment.piece_count > 0) {
        const sw_u64 tiles = sw_parts(segment.piece_bytes, SW_MOVE_TILE_BYTES);
        const sw_u64 piece = tiles == 1 ? tile : tile / tiles;
        tile -= piece * tiles;
        range.to = (char *)segment.to + piece * segment.to_pitch;
        if (segment.from)
            range.from = (const char *)segment.from + piece * segment.from_pitch;
        range.size_bytes =
            sw_low(segment.size_bytes - piece * segment.piece_bytes, segment.piece_bytes);
        if (tile * SW_MOVE_TILE_BYTES >= range.size_bytes) /* the last piece has fewer */
            range.size_bytes = tile = 0;
    }
    return range;
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

/* Zeros in place of the elements of a tile. */
SW_RARELY void sw_pack_zeros(const sw_pack_segment &segment, sw_u64 tile, unsigned to_bytes,
                             unsigned from_bytes)
{
    const sw_u64 most = SW_MOVE_TILE_BYTES / from_bytes * to_bytes, start = tile * most;
    const sw_u64 bytes = sw_low(segment.size_bytes / from_bytes * to_bytes - start, most);
    char *to = (char *)segment.to + start;
    const sw_u64 lanes = (sw_u64)to % 16 == 0 ? bytes / 16 : 0;
    for (sw_u64 i = threadIdx.x; i < lanes; i += blockDim.x)
        ((sw_lane16 *)to)[i] = {};
    for (sw_u64 i = 16 * lanes + threadIdx.x; i < bytes; i += blockDim.x)
        to[i] = 0;
}

SW_INLINE void sw_pack_tile(const sw_pack_segment &segment, sw_u64 tile)
{
    if (!segment.from)
        return sw_pack_zeros(segment, tile, 1, 1);
    const sw_u64 start = tile * SW_MOVE_TILE_BYTES;
    const unsigned bytes = (unsigned)sw_low(segment.size_bytes - start, SW_MOVE_TILE_BYTES);
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

/* A gradient that is not clipped is not touched. */
SW_INLINE void sw_pack_converted(const sw_pack_args &a, const sw_pack_segment &segment, sw_u64 tile)
{
    const float scale = a.factor ? *(const float *)a.factor : a.scale;
    if (a.factor && scale == 1.0f && segment.to == segment.from)
        return;
    if (!segment.from)
        return sw_pack_zeros(segment, tile, sw_small_bytes(a.to_dtype),
                             sw_small_bytes(a.from_dtype));
    sw_cast_tile(segment.to, segment.from, segment.size_bytes / sw_small_bytes(a.from_dtype), scale,
                 a.to_dtype, a.from_dtype, tile);
}

template <bool CONVERTS> SW_INLINE void sw_pack_all(const sw_pack_args &a)
{
    sw_u64 first = 0;
    int i = 0;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_pack_args, sw_pack_tiles>(a, a.segment_count, i, first, at);
        if (i == a.segment_count)
            return;
        sw_u64 tile = at - first;
        const sw_pack_segment range = sw_pack_range(a.segment[i], tile);
        if constexpr (CONVERTS)
            sw_pack_converted(a, range, tile);
        else
            sw_pack_tile(range, tile);
    }
}

SW_KERNEL_OF(3) sw_pack(const sw_pack_args a)
{
    if (a.verdict && *(const int *)a.verdict != 0)
        return;
    if (a.converts)
        sw_pack_all<true>(a);
    else
        sw_pack_all<false>(a);
}

SW_KERNEL sw_put(const sw_put_args a)
{
    SW_EACH(i, (sw_u64)a.size_bytes)
    ((unsigned char *)a.to)[i] = a.byte[i];
}
