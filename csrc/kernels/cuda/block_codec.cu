/* block_codec.cu - QUANTIZE, FOLD_RECORDS, DECODE, VERDICT, OWE: host/block_body.h's records, one
 * block of threads a record where it is made.
 *
 * Idea: all parts of a launch are cut into tiles (records, or about 1024 elements) that blocks of
 * threads take in turns. A block's tiles only grow, so it walks over the parts once.
 */

enum {
    SW_BLOCK_MAX = 4096, /* elements of a record */
    SW_TILE_NUMEL = 1024,
};

SW_INLINE sw_u64 sw_record_bytes(sw_u64 block, int bits)
{
    return 4 + block * (sw_u64)bits / 8;
}

/* Element i as the records have it. */
SW_INLINE float sw_decoded(const void *records, unsigned i, unsigned block, int bits)
{
    const unsigned r = i / block, at = i % block;
    const unsigned char *record = (const unsigned char *)records + r * sw_record_bytes(block, bits);
    const float scale = __uint_as_float(*(const unsigned *)record);
    int code;
    if (bits == 8)
        code = (signed char)record[4 + at];
    else
        code = (int)(((record[4 + at / 2] >> (at % 2 ? 4 : 0)) & 15u) ^ 8u) - 8;
    return scale * (float)code;
}

/* A record of value(0 .. block), of which `most` are the bits of the greatest magnitude, by all
 * threads of a block. With a residual: what that rounding left out. */
template <class VALUE>
SW_INLINE void sw_write_record(unsigned *record, unsigned block, int bits, unsigned most,
                               const VALUE &value, float *residual)
{
    const float rounder = 12582912.0f; /* 1.5 * 2^23: the sum rounds to nearest even */
    const float levels = bits == 8 ? 127.0f : 7.0f, greatest = __uint_as_float(most);
    const bool finite = most < 0x7f800000u, empty = !finite || most < (7u << 23); /* 2^-120 */
    const float inverse = empty ? 0.0f : __fdiv_rn(levels, greatest);
    const float scale =
        empty ? __uint_as_float(finite ? 0u : 0x7fc00000u) : __fdiv_rn(greatest, levels);
    const unsigned per_word = 32u / (unsigned)bits, mask = bits == 8 ? 255u : 15u;
    if (threadIdx.x == 0)
        record[0] = __float_as_uint(scale);
    for (unsigned w = threadIdx.x; w < block / per_word; w += blockDim.x) {
        unsigned word = 0;
        for (unsigned k = 0; k < per_word; ++k) {
            const float v = value(w * per_word + k);
            const int code = empty ? 0 : (int)((v * inverse + rounder) - rounder);
            word |= ((unsigned)code & mask) << (k * (unsigned)bits);
            if (residual)
                residual[w * per_word + k] = (v + 0.0f) - scale * (float)code;
        }
        record[1 + w] = word;
    }
}

/* `most`, or the bits of a magnitude that is greater. */
SW_INLINE unsigned sw_greater(unsigned most, float value)
{
    const unsigned magnitude = __float_as_uint(value) & 0x7fffffffu;
    return magnitude > most ? magnitude : most;
}

/* What QUANTIZE rounds of one record. */
struct sw_quantized {
    const float *source, *error;
    sw_u64 numel; /* of the part, from this record on */

    SW_METHOD float operator()(unsigned i) const
    {
        if (!source || i >= numel)
            return 0.0f;
        return error ? source[i] + error[i] : source[i];
    }
};

SW_INLINE sw_u64 sw_quantize_tiles(const sw_quantize_args &a, int i)
{
    return sw_parts(a.part[i].numel, a.block);
}

SW_KERNEL sw_quantize(const sw_quantize_args a)
{
    __shared__ unsigned most;
    const unsigned block = (unsigned)a.block;
    sw_u64 first = 0;
    int i = 0;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_quantize_args, sw_quantize_tiles>(a, a.part_count, i, first, at);
        if (i == a.part_count)
            return;
        const sw_quantize_part &part = a.part[i];
        const sw_u64 start = (at - first) * block;
        const float *source = (const float *)part.source, *error = (const float *)part.error;
        const sw_quantized value = {source ? source + start : source,
                                    error ? error + start : error, part.numel - start};
        __syncthreads();
        if (threadIdx.x == 0)
            most = 0;
        __syncthreads();
        unsigned own = 0;
        for (unsigned k = threadIdx.x; k < block; k += blockDim.x)
            own = sw_greater(own, value(k));
        atomicMax(&most, own);
        __syncthreads();
        sw_write_record((unsigned *)((unsigned char *)part.records +
                                     (at - first) * sw_record_bytes(block, a.bits)),
                        block, a.bits, most, value, (float *)0);
    }
}

/* scale * the sum of the contributions' element i of the record at `offset`. */
SW_INLINE float sw_record_mean(const sw_fold_records_args &a, sw_u64 offset, unsigned i)
{
    float sum = 0.0f;
    for (int k = 0; k < a.source_count; ++k) {
        const unsigned char *from = k == a.own_index
                                        ? (const unsigned char *)a.own
                                        : (const unsigned char *)a.others + k * a.stride_bytes;
        const float value = sw_decoded(from + offset, i, (unsigned)a.block, a.bits);
        sum = k ? sum + value : value;
    }
    return sum * a.scale;
}

struct sw_shared_values {
    const float *values;

    SW_METHOD float operator()(unsigned i) const { return values[i]; }
};

SW_KERNEL sw_fold_records(const sw_fold_records_args a)
{
    __shared__ float mean[SW_BLOCK_MAX];
    __shared__ unsigned most;
    const unsigned block = (unsigned)a.block;
    for (sw_u64 r = blockIdx.x; r < a.count; r += gridDim.x) {
        const sw_u64 offset = r * sw_record_bytes(block, a.bits);
        const sw_shared_values value = {mean};
        __syncthreads();
        if (threadIdx.x == 0)
            most = 0;
        __syncthreads();
        unsigned own = 0;
        for (unsigned i = threadIdx.x; i < block; i += blockDim.x) {
            mean[i] = sw_record_mean(a, offset, i);
            own = sw_greater(own, mean[i]);
        }
        atomicMax(&most, own);
        __syncthreads();
        sw_write_record((unsigned *)((unsigned char *)a.to + offset), block, a.bits, most, value,
                        a.residual ? (float *)a.residual + r * block : (float *)0);
    }
}

/* Elements of a tile of whole records. */
SW_INLINE unsigned sw_decode_numel(unsigned block)
{
    return block < SW_TILE_NUMEL ? SW_TILE_NUMEL / block * block : block;
}

SW_INLINE sw_u64 sw_decode_tiles(const sw_decode_args &a, int i)
{
    return sw_parts(a.part[i].numel, sw_decode_numel((unsigned)a.block));
}

SW_INLINE void sw_decode_tile(const sw_decode_args &a, const sw_decode_part &part, sw_u64 tile,
                              bool keeps)
{
    const unsigned block = (unsigned)a.block, most = sw_decode_numel(block);
    const sw_u64 start = tile * most, skip = tile * (most / block) * sw_record_bytes(block, a.bits);
    const unsigned numel = (unsigned)sw_low(part.numel - start, most);
    float *values = (float *)part.values + start;
    for (unsigned t = threadIdx.x; t < numel; t += blockDim.x) {
        if (keeps && part.error) {
            float *error = (float *)part.error + start + t;
            const void *own = (const unsigned char *)part.own + skip;
            *error = (values[t] + *error) - sw_decoded(own, t, block, a.bits);
        }
        if (part.records)
            values[t] = sw_decoded((const unsigned char *)part.records + skip, t, block, a.bits);
    }
}

SW_KERNEL sw_decode(const sw_decode_args a)
{
    const bool keeps = !a.verdict || *(const int *)a.verdict == 0;
    sw_u64 first = 0;
    int i = 0;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_decode_args, sw_decode_tiles>(a, a.part_count, i, first, at);
        if (i == a.part_count)
            return;
        sw_decode_tile(a, a.part[i], at - first, keeps);
    }
}

/* Whoever finds one writes the same. */
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

SW_INLINE sw_u64 sw_owe_tiles(const sw_owe_args &a, int i)
{
    return sw_parts(a.part[i].numel, SW_TILE_NUMEL);
}

SW_KERNEL sw_owe(const sw_owe_args a)
{
    sw_u64 first = 0;
    int i = 0;
    if (*(const int *)a.verdict != 0)
        return;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_owe_args, sw_owe_tiles>(a, a.part_count, i, first, at);
        if (i == a.part_count)
            return;
        const sw_u64 start = (at - first) * SW_TILE_NUMEL;
        const unsigned numel = (unsigned)sw_low(a.part[i].numel - start, SW_TILE_NUMEL);
        float *error = (float *)a.part[i].error + start;
        for (unsigned t = threadIdx.x; t < numel; t += blockDim.x)
            error[t] = error[t] + ((const float *)a.part[i].rest)[start + t] * a.scale;
    }
}
