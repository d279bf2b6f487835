/* block_codec.cu - QUANTIZE, FOLD_RECORDS, DECODE, VERDICT, OWE: host/block_body.h's records.
 *
 * A team handles a record: a power-of-two number of lanes of one warp that hold the record in
 * registers, 16 elements a lane. A lane loads 64 bytes or more before it uses one, a team finds the
 * greatest magnitude by shuffles, and no thread waits for another warp. A record of more than 512
 * elements takes a whole warp, which reads it twice, the second time from L2.
 *
 * All parts of a launch are cut into tiles (records, or OWE's elements) that the blocks of threads
 * take in turns. Each block computes once, in shared memory, the records before each part:
 * one division a part. Blocks of threads are whole warps.
 */

enum {
    SW_TEAM_NUMEL = 16, /* elements that a lane holds at once */
    SW_FOLD_RECORDS_AHEAD = 3,
    SW_OWE_TILE_NUMEL = 2048,
};

SW_INLINE sw_u64 sw_record_bytes(sw_u64 block, int bits)
{
    return 4 + block * (sw_u64)bits / 8;
}

/* The lanes that share a record, and the position of the calling lane. */
struct sw_team {
    unsigned lanes, lane;

    SW_METHOD unsigned records_a_warp() const
    {
        return 32 / lanes;
    }
    /* Return the greatest value of the team. All lanes of the warp call it. */
    SW_METHOD unsigned most(unsigned value) const
    {
        for (unsigned step = lanes / 2; step > 0; step /= 2) {
            const unsigned other = __shfl_xor_sync(0xffffffffu, value, step);
            value = other > value ? other : value;
        }
        return value;
    }
};

SW_INLINE sw_team sw_team_of(unsigned block)
{
    unsigned lanes = 2; /* a record has at least 32 elements */
    while (lanes < 32 && lanes * SW_TEAM_NUMEL < block)
        lanes *= 2;
    return {lanes, threadIdx.x & (lanes - 1)};
}

/* ---- codes: words of 4 or 8 ---- */

/* Return the lowest bytes of four words. */
SW_INLINE unsigned sw_low_bytes(unsigned a, unsigned b, unsigned c, unsigned d)
{
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

template <int BITS> struct sw_codes;

/* With the bits of 2^23 above it, a code c is the float 2^23 + 128 + c (4 bits: 2^23 + 8 + c). */
template <> struct sw_codes<8> {
    enum { NUMEL = 4 };
    SW_INLINE void decode(float *x, unsigned word)
    {
        word ^= 0x80808080u;
#pragma unroll
        for (int j = 0; j < NUMEL; ++j)
            x[j] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650u | j)) - 8388736.0f;
    }
    SW_INLINE unsigned encode(const unsigned *code)
    {
        return sw_low_bytes(code[0], code[1], code[2], code[3]);
    }
};
template <> struct sw_codes<4> {
    enum { NUMEL = 8 };
    SW_INLINE void decode(float *x, unsigned word)
    {
        word ^= 0x88888888u;
#pragma unroll
        for (int j = 0; j < NUMEL; ++j)
            x[j] = __uint_as_float((word >> 4 * j & 15u) | 0x4b000000u) - 8388616.0f;
    }
    SW_INLINE unsigned encode(const unsigned *code)
    {
        return (sw_low_bytes(code[0], code[2], code[4], code[6]) & 0x0f0f0f0fu) |
               (sw_low_bytes(code[1], code[3], code[5], code[7]) & 0x0f0f0f0fu) << 4;
    }
};

/* Return the number of elements of `numel` from `at` on. */
SW_INLINE unsigned sw_left(unsigned at, unsigned numel)
{
    return at < numel ? numel - at : 0;
}

/* The words of a record of `block` elements that a lane holds at once: words lane, lane + lanes,
 * ... from word `first` to the end of the record. */
template <int BITS> struct sw_share {
    enum { NUMEL = sw_codes<BITS>::NUMEL, WORDS = SW_TEAM_NUMEL / NUMEL };
    sw_team team;
    unsigned first, words; /* words of the record */

    SW_METHOD unsigned word(int k) const
    {
        return first + k * team.lanes + team.lane;
    }
    SW_METHOD bool has(int k) const
    {
        return word(k) < words;
    }
    /* Return the element with which vector v of the lane's four begins. */
    SW_METHOD unsigned element(int v) const
    {
        return word(v * 4 / NUMEL) * NUMEL + v * 4 % NUMEL;
    }
    SW_METHOD void load_words(unsigned *word_of, const void *record) const
    {
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            word_of[k] = has(k) ? ((const unsigned *)record)[1 + word(k)] : 0;
    }
    /* Load its elements of a float32 array of `numel`; zeros beyond. WIDE: see sw_is_whole. */
    template <bool WIDE>
    SW_METHOD void load(sw_lane16 *raw, const float *array, unsigned numel) const
    {
#pragma unroll
        for (int v = 0; v < 4; ++v)
            raw[v] = {};
        if constexpr (WIDE) {
#pragma unroll
            for (int v = 0; v < 4; ++v)
                if (has(v * 4 / NUMEL))
                    raw[v] = *(const sw_lane16 *)(array + element(v));
        } else {
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const unsigned *from = (const unsigned *)array + element(v);
                const unsigned left = sw_left(element(v), numel);
#pragma unroll
                for (unsigned j = 0; j < 4; ++j)
                    if (j < left)
                        raw[v].word[j] = from[j];
            }
        }
    }
    /* Store the elements of its word k. */
    template <bool WIDE>
    SW_METHOD void store(float *array, int k, const float *x, unsigned numel) const
    {
        const unsigned at = word(k) * NUMEL, left = sw_left(at, numel);
        if constexpr (WIDE) {
#pragma unroll
            for (int v = 0; v < NUMEL / 4; ++v) {
                const sw_lane16 lane = {{__float_as_uint(x[4 * v]), __float_as_uint(x[4 * v + 1]),
                                         __float_as_uint(x[4 * v + 2]),
                                         __float_as_uint(x[4 * v + 3])}};
                if (has(k))
                    sw_put16(array + at + 4 * v, lane);
            }
        } else {
#pragma unroll
            for (unsigned j = 0; j < NUMEL; ++j)
                if (j < left)
                    array[at + j] = x[j];
        }
    }
};

SW_INLINE float sw_float_of(const sw_lane16 *raw, int i)
{
    return __uint_as_float(raw[i / 4].word[i % 4]);
}

/* Report if vectors of four of a record's elements can be one access each. */
SW_INLINE bool sw_is_whole(const float *array, unsigned numel, unsigned block)
{
    return numel == block && sw_is_wide(array, SW_ARG_FLOAT32);
}

/* ---- write a record ---- */

/* The rounding of a record, from the bits of its greatest magnitude. */
struct sw_rounding {
    bool is_empty;
    float inverse, scale;

    SW_METHOD sw_rounding(unsigned most, int bits)
    {
        const float levels = bits == 8 ? 127.0f : 7.0f, greatest = __uint_as_float(most);
        const bool is_finite = most < 0x7f800000u;
        is_empty = !is_finite || most < (7u << 23); /* 2^-120 */
        inverse = is_empty ? 0.0f : __fdiv_rn(levels, greatest);
        scale =
            is_empty ? __uint_as_float(is_finite ? 0u : 0x7fc00000u) : __fdiv_rn(greatest, levels);
    }
};

/* Write the words of x. With a residual, also the rounding errors. */
template <int BITS>
SW_INLINE void sw_write_share(const sw_share<BITS> &share, unsigned *record, float *residual,
                              unsigned block, const float *x, const sw_rounding &how)
{
    enum { NUMEL = sw_codes<BITS>::NUMEL };
    const float rounder = 12582912.0f; /* 1.5 * 2^23: the sum rounds to nearest even */
    const bool is_wide = sw_is_whole(residual, block, block);
#pragma unroll
    for (int k = 0; k < sw_share<BITS>::WORDS; ++k) {
        unsigned code[NUMEL];
        float left[NUMEL];
#pragma unroll
        for (int j = 0; j < NUMEL; ++j) {
            const float v = x[k * NUMEL + j], moved = v * how.inverse + rounder;
            code[j] = __float_as_uint(moved); /* the low bits are the code in two's complement */
            left[j] = (v + 0.0f) - how.scale * (how.is_empty ? 0.0f : moved - rounder);
        }
        if (share.has(k))
            record[1 + share.word(k)] = how.is_empty ? 0 : sw_codes<BITS>::encode(code);
        if (residual && is_wide)
            share.template store<true>(residual, k, left, block);
        else if (residual)
            share.template store<false>(residual, k, left, block);
    }
}

/* Write the record of the values that `values` loads, if the team has one. All lanes of a warp call
 * it. */
template <int BITS, class VALUES>
SW_INLINE void sw_write_record(sw_team team, bool has_one, unsigned *record, float *residual,
                               unsigned block, const VALUES &values)
{
    typedef sw_share<BITS> share_type;
    const unsigned words = has_one ? block / share_type::NUMEL : 0;
    const unsigned turn = team.lanes * share_type::WORDS;
    const bool is_one_turn = block / share_type::NUMEL <= turn;
    float x[SW_TEAM_NUMEL];
    unsigned most = 0;
#pragma unroll 1
    for (unsigned first = 0; first == 0 || first < words; first += turn) {
        if (has_one)
            values.load(x, share_type{team, first, words});
#pragma unroll
        for (int i = 0; i < SW_TEAM_NUMEL; ++i) {
            const unsigned magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
            most = has_one && magnitude > most ? magnitude : most;
        }
    }
    const sw_rounding how(team.most(most), BITS);
    if (has_one && team.lane == 0)
        record[0] = __float_as_uint(how.scale);
#pragma unroll 1
    for (unsigned first = 0; first < words; first += turn) {
        const share_type share = {team, first, words};
        if (!is_one_turn)
            values.load(x, share);
        sw_write_share<BITS>(share, record, residual, block, x, how);
    }
}

/* ---- the parts of a launch ---- */

struct sw_part_table {
    unsigned tiles[SW_BLOCK_PARTS_MAX], first[SW_BLOCK_PARTS_MAX + 1];
};

/* Fill the table. All threads of a block call it. At most 2^37 elements in all. */
template <class ARGS> SW_INLINE void sw_part_table_fill(sw_part_table &table, const ARGS &a)
{
    const unsigned steps = (unsigned)(a.block / 32);
    for (int i = threadIdx.x; i < a.part_count; i += blockDim.x)
        table.tiles[i] = ((unsigned)((a.part[i].numel + 31) / 32) + steps - 1) / steps;
    __syncthreads();
    for (int i = threadIdx.x; i <= a.part_count; i += blockDim.x) {
        unsigned sum = 0;
        for (int k = 0; k < i; ++k)
            sum += table.tiles[k];
        table.first[i] = sum;
    }
    __syncthreads();
}

/* Return the part of record `at`, searching from part i on. */
SW_INLINE int sw_part_at(const sw_part_table &table, int count, int i, unsigned at)
{
    if (at < table.first[i + 1])
        return i;
    for (int end = count; end - i > 1;) {
        const int middle = (i + end) / 2;
        if (table.first[middle] <= at)
            i = middle;
        else
            end = middle;
    }
    return i;
}

/* Call each(has_one, i, record) for all records, by whole warps: i is a part, `record` its number
 * in that part. */
template <class ARGS, class EACH>
SW_INLINE void sw_records(const ARGS &a, const sw_part_table &table, sw_team team, const EACH &each)
{
    const unsigned warps = blockDim.x / 32, few = team.records_a_warp();
    const unsigned total = table.first[a.part_count];
    int i = 0;
    for (sw_u64 first = ((sw_u64)blockIdx.x * warps + threadIdx.x / 32) * few; first < total;
         first += (sw_u64)gridDim.x * warps * few) {
        const sw_u64 at = first + (threadIdx.x & 31u) / team.lanes;
        if (at < total)
            i = sw_part_at(table, a.part_count, i, (unsigned)at);
        each(at < total, i, (sw_u64)((unsigned)at - table.first[i]));
    }
}

/* ---- quantize ---- */

/* The values of one record that QUANTIZE rounds. */
template <bool WIDE> struct sw_quantized {
    const float *source, *error;
    unsigned numel;

    template <int BITS> SW_METHOD void load(float *x, const sw_share<BITS> &share) const
    {
        sw_lane16 raw[4], raw_error[4];
        share.template load<WIDE>(raw, source, numel);
#pragma unroll
        for (int i = 0; i < SW_TEAM_NUMEL; ++i)
            x[i] = sw_float_of(raw, i);
        if (!error) /* a branch, not a choice an element, which costs Blackwell 50 registers */
            return;
        share.template load<WIDE>(raw_error, error, numel);
#pragma unroll
        for (int i = 0; i < SW_TEAM_NUMEL; ++i)
            x[i] = x[i] + sw_float_of(raw_error, i);
    }
};

template <int BITS> struct sw_quantize_each {
    const sw_quantize_args &a;
    sw_team team;

    SW_METHOD void operator()(bool has_one, int i, sw_u64 record) const
    {
        const sw_quantize_part &part = a.part[i];
        const unsigned block = (unsigned)a.block;
        const sw_u64 start = record * block;
        const float *source = (const float *)part.source, *error = (const float *)part.error;
        source = source ? source + start : source;
        error = source && error ? error + start : (const float *)0;
        const unsigned numel = source ? (unsigned)sw_low(part.numel - start, block) : 0;
        const bool is_wide = sw_is_whole(source, numel, block) && sw_is_wide(error, SW_ARG_FLOAT32);
        unsigned *to =
            (unsigned *)((unsigned char *)part.records + record * sw_record_bytes(block, BITS));
        if (__all_sync(0xffffffffu, !has_one || is_wide)) /* the warp must not diverge below */
            sw_write_record<BITS>(team, has_one, to, (float *)0, block,
                                  sw_quantized<true>{source, error, numel});
        else
            sw_write_record<BITS>(team, has_one, to, (float *)0, block,
                                  sw_quantized<false>{source, error, numel});
    }
};

SW_KERNEL_OF(3) sw_quantize(const sw_quantize_args a)
{
    __shared__ sw_part_table table;
    const sw_team team = sw_team_of((unsigned)a.block);
    sw_part_table_fill(table, a);
    if (a.bits == 8)
        sw_records(a, table, team, sw_quantize_each<8>{a, team});
    else
        sw_records(a, table, team, sw_quantize_each<4>{a, team});
}

/* ---- fold_records ---- */

/* scale * the sum of the contributions' records at `offset`. */
struct sw_record_mean {
    const sw_fold_records_args &a;
    sw_u64 offset;

    SW_METHOD const unsigned *record(int k) const
    {
        const unsigned char *from = k == a.own_index
                                        ? (const unsigned char *)a.own
                                        : (const unsigned char *)a.others + k * a.stride_bytes;
        return (const unsigned *)(from + offset);
    }

    template <int BITS> SW_METHOD void load(float *x, const sw_share<BITS> &share) const
    {
        enum { AHEAD = SW_FOLD_RECORDS_AHEAD, WORDS = sw_share<BITS>::WORDS };
        enum { NUMEL = sw_share<BITS>::NUMEL };
#pragma unroll 1
        for (int begin = 0; begin < a.source_count; begin += AHEAD) {
            unsigned word[AHEAD][WORDS], scale[AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; ++s)
                if (begin + s < a.source_count) {
                    share.load_words(word[s], record(begin + s));
                    scale[s] = record(begin + s)[0];
                }
#pragma unroll
            for (int s = 0; s < AHEAD; ++s) {
                if (begin + s == a.source_count)
                    break;
#pragma unroll
                for (int k = 0; k < WORDS; ++k) {
                    float code[NUMEL];
                    sw_codes<BITS>::decode(code, word[s][k]);
#pragma unroll
                    for (int j = 0; j < NUMEL; ++j) {
                        const float value = __uint_as_float(scale[s]) * code[j];
                        x[k * NUMEL + j] = s == 0 && begin == 0 ? value : x[k * NUMEL + j] + value;
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < SW_TEAM_NUMEL; ++i)
            x[i] = share.has(i / NUMEL) ? x[i] * a.scale : 0.0f;
    }
};

template <int BITS> SW_INLINE void sw_fold_records_of(const sw_fold_records_args &a)
{
    const unsigned block = (unsigned)a.block, warps = blockDim.x / 32;
    const sw_team team = sw_team_of(block);
    const unsigned few = team.records_a_warp();
    for (sw_u64 first = ((sw_u64)blockIdx.x * warps + threadIdx.x / 32) * few; first < a.count;
         first += (sw_u64)gridDim.x * warps * few) {
        const sw_u64 at = first + (threadIdx.x & 31u) / team.lanes;
        const sw_u64 offset = at * sw_record_bytes(block, BITS);
        sw_write_record<BITS>(team, at < a.count, (unsigned *)((unsigned char *)a.to + offset),
                              a.residual ? (float *)a.residual + at * block : (float *)0, block,
                              sw_record_mean{a, offset});
    }
}

SW_KERNEL_OF(3) sw_fold_records(const sw_fold_records_args a)
{
    if (a.bits == 8)
        sw_fold_records_of<8>(a);
    else
        sw_fold_records_of<4>(a);
}

/* ---- decode ---- */

/* Decode the elements of a word of a record. */
template <int BITS> SW_INLINE void sw_decoded(float *x, unsigned word, unsigned scale)
{
    sw_codes<BITS>::decode(x, word);
#pragma unroll
    for (int j = 0; j < sw_codes<BITS>::NUMEL; ++j)
        x[j] = __uint_as_float(scale) * x[j];
}

/* Decode element i of a record alone. */
template <int BITS> SW_INLINE float sw_decoded_at(const void *record, unsigned i)
{
    const unsigned byte = ((const unsigned char *)record)[4 + i * BITS / 8];
    const int code =
        BITS == 8 ? (int)(signed char)byte : (int)((byte >> (i % 2 ? 4 : 0) & 15u) ^ 8u) - 8;
    return __uint_as_float(*(const unsigned *)record) * (float)code;
}

template <int BITS> struct sw_decode_each {
    const sw_decode_args &a;
    sw_team team;
    bool keeps;

    SW_METHOD void operator()(bool has_one, int i, sw_u64 record) const
    {
        typedef sw_share<BITS> share_type;
        const sw_decode_part &part = a.part[i];
        const unsigned block = (unsigned)a.block;
        const sw_u64 start = record * block, skip = record * sw_record_bytes(block, BITS);
        if (!has_one)
            return;
        const unsigned numel = (unsigned)sw_low(part.numel - start, block);
        float *values = (float *)part.values + start;
        float *error = keeps && part.error ? (float *)part.error + start : (float *)0;
        const void *own = (const unsigned char *)part.own + skip;
        const void *codes = part.records ? (const unsigned char *)part.records + skip : 0;
        const bool is_wide = sw_is_whole(values, numel, block) && sw_is_wide(error, SW_ARG_FLOAT32);
        const unsigned words = block / share_type::NUMEL;
#pragma unroll 1
        for (unsigned first = 0; is_wide && first < words; first += team.lanes * share_type::WORDS)
            decode({team, first, words}, values, error, own, codes);
        for (unsigned t = team.lane; !is_wide && t < numel; t += team.lanes) {
            if (error)
                error[t] = (values[t] + error[t]) - sw_decoded_at<BITS>(own, t);
            if (codes)
                values[t] = sw_decoded_at<BITS>(codes, t);
        }
    }

    SW_METHOD void decode(const sw_share<BITS> &share, float *values, float *error, const void *own,
                          const void *codes) const
    {
        enum { NUMEL = sw_codes<BITS>::NUMEL, WORDS = sw_share<BITS>::WORDS };
        unsigned word[WORDS];
        if (error) {
            const unsigned scale = *(const unsigned *)own;
            sw_lane16 value[4], owed[4];
            share.load_words(word, own);
            share.template load<true>(value, values, 0);
            share.template load<true>(owed, error, 0);
#pragma unroll
            for (int k = 0; k < WORDS; ++k) {
                float x[NUMEL];
                sw_decoded<BITS>(x, word[k], scale);
#pragma unroll
                for (int j = 0; j < NUMEL; ++j)
                    x[j] = (sw_float_of(value, k * NUMEL + j) + sw_float_of(owed, k * NUMEL + j)) -
                           x[j];
                share.template store<true>(error, k, x, 0);
            }
        }
        if (codes) {
            const unsigned scale = *(const unsigned *)codes;
            share.load_words(word, codes);
#pragma unroll
            for (int k = 0; k < WORDS; ++k) {
                float x[NUMEL];
                sw_decoded<BITS>(x, word[k], scale);
                share.template store<true>(values, k, x, 0);
            }
        }
    }
};

SW_KERNEL_OF(3) sw_decode(const sw_decode_args a)
{
    __shared__ sw_part_table table;
    const sw_team team = sw_team_of((unsigned)a.block);
    const bool keeps = !a.verdict || *(const int *)a.verdict == 0;
    sw_part_table_fill(table, a);
    if (a.bits == 8)
        sw_records(a, table, team, sw_decode_each<8>{a, team, keeps});
    else
        sw_records(a, table, team, sw_decode_each<4>{a, team, keeps});
}

/* Several threads may find one; all write the same value. */
SW_KERNEL sw_verdict(const sw_verdict_args a)
{
    const sw_u64 bytes = sw_record_bytes(a.block, a.bits);
    SW_EACH(r, a.count)
    {
        const unsigned scale = *(const unsigned *)((const unsigned char *)a.records + r * bytes);
        if ((scale & 0x7fffffffu) > 0x7f800000u)
            *(int *)a.verdict = 1;
    }
}

/* ---- owe ---- */

SW_INLINE sw_u64 sw_owe_tiles(const sw_owe_args &a, int i)
{
    return sw_parts(a.part[i].numel, SW_OWE_TILE_NUMEL);
}

/* Load two vectors of each array, or twice four elements a block apart, before one is used. */
template <bool WIDE>
SW_INLINE void sw_owe_fours(const sw_owe_args &a, float *error, const float *rest, unsigned begin,
                            unsigned end)
{
    enum { EACH = 2 };
    const unsigned turn = 4 * blockDim.x;
    for (unsigned start = begin; start < end; start += EACH * turn) {
        sw_lane16 owed[EACH], more[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const unsigned first = start + e * turn + (WIDE ? 4 : 1) * threadIdx.x;
            const sw_four<WIDE> four = {first, blockDim.x, end};
            if (first < end) {
                owed[e] = four.load(error, SW_ARG_FLOAT32);
                more[e] = four.load(rest, SW_ARG_FLOAT32);
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const unsigned first = start + e * turn + (WIDE ? 4 : 1) * threadIdx.x;
            const sw_four<WIDE> four = {first, blockDim.x, end};
            float x[4];
            for (int k = 0; k < 4; ++k)
                x[k] =
                    __uint_as_float(owed[e].word[k]) + __uint_as_float(more[e].word[k]) * a.scale;
            if (first < end)
                four.store(error, x, SW_ARG_FLOAT32);
        }
    }
}

SW_KERNEL_OF(4) sw_owe(const sw_owe_args a)
{
    sw_u64 first = 0;
    int i = 0;
    if (*(const int *)a.verdict != 0)
        return;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_owe_args, sw_owe_tiles>(a, a.part_count, i, first, at);
        if (i == a.part_count)
            return;
        const sw_u64 start = (at - first) * SW_OWE_TILE_NUMEL;
        const unsigned numel = (unsigned)sw_low(a.part[i].numel - start, SW_OWE_TILE_NUMEL);
        float *error = (float *)a.part[i].error + start;
        const float *rest = (const float *)a.part[i].rest + start;
        const bool is_wide = sw_is_wide(error, SW_ARG_FLOAT32) && sw_is_wide(rest, SW_ARG_FLOAT32);
        const unsigned covered = is_wide ? numel / 4 * 4 : 0;
        sw_owe_fours<true>(a, error, rest, 0, covered);
        sw_owe_fours<false>(a, error, rest, covered, numel);
    }
}
