/* move.cu - CAST and PACK. */

SW_KERNEL sw_cast(const sw_cast_args a)
{
    SW_EACH(i, a.numel)
        sw_store(a.to, i, a.to_dtype, sw_load(a.from, i, a.from_dtype) * a.scale);
}

/* One segment by the whole grid: 16 bytes a thread where both ends allow it, the rest by bytes. */
SW_INLINE void sw_pack_one(const sw_pack_segment &segment)
{
    sw_u64 to = (sw_u64)segment.to, from = (sw_u64)segment.from;
    sw_u64 lanes = ((to | from) & 15) == 0 ? segment.size_bytes / 16 : 0;
    SW_EACH(i, lanes)
        ((sw_lane16 *)segment.to)[i] = ((const sw_lane16 *)segment.from)[i];
    SW_EACH(j, segment.size_bytes - 16 * lanes)
        ((unsigned char *)segment.to)[16 * lanes + j] =
            ((const unsigned char *)segment.from)[16 * lanes + j];
}

SW_KERNEL sw_pack(const sw_pack_args a)
{
    if (a.verdict && *(const int *)a.verdict != 0)
        return;
    for (int s = 0; s < a.segment_count; ++s)
        sw_pack_one(a.segment[s]);
}
