/* device_codec_module.c - the module's functions that compress GPU gradients
 * (compress/device_codec.h). Addresses are integers. Each call enqueues work on the given stream
 * and returns. */
#include "compress/device_codec.h"
#include "python/device_call.h"

SW_PY_ROW(fill_quantize, sw_quantize_part, .records = a[0].address, .source = a[1].address,
          .error = a[2].address, .numel = a[3].word)

SW_PY_ROW(fill_decode, sw_decode_part, .values = a[0].address, .error = a[1].address,
          .records = a[2].address, .own = a[3].address, .numel = a[4].word)

SW_PY_ROW(fill_owe, sw_owe_part, .error = a[0].address, .rest = a[1].address, .numel = a[2].word)

static sw_device_blocks blocks_of(const sw_device_comm *comm, const sw_py_arg *a,
                                  const sw_py_arg *stream)
{
    return (sw_device_blocks){.kernels = &comm->kernels,
                              .codec = {.block = a[1].n < 0 ? 0 : a[1].size, .bits = a[2].i},
                              .stream = stream->address};
}

/* A call on `blocks`, whose codec is checked first. */
#define ON_BLOCKS(stream, call)                                         \
    __extension__({                                                     \
        const sw_device_blocks blocks = blocks_of(comm, a, &(stream));  \
        sw_status is_known = sw_block_codec_check(&blocks.codec, &err); \
        is_known == SW_OK ? (call) : is_known;                          \
    })

SW_PY_ON_ROWS(device_block_encode, "device_block_encode comm:O block:n bits:i parts:L stream:A", 3,
              "part records:A source:A error:A numel:K", sw_quantize_part, fill_quantize,
              ON_BLOCKS(a[4], sw_device_block_encode(&blocks, rows.rows, rows.count, &err)))
SW_PY_ON_ROWS(device_block_decode,
              "device_block_decode comm:O block:n bits:i parts:L verdict:A stream:A", 3,
              "part values:A error:A records:A own:A numel:K", sw_decode_part, fill_decode,
              ON_BLOCKS(a[5],
                        sw_device_block_decode(&blocks, rows.rows, rows.count, a[4].address, &err)))
SW_PY_ON_ROWS(device_block_owe,
              "device_block_owe comm:O block:n bits:i parts:L verdict:A scale:d stream:A", 3,
              "part error:A rest:A numel:K", sw_owe_part, fill_owe,
              ON_BLOCKS(a[6], sw_device_block_owe(&blocks, rows.rows, rows.count, a[4].address,
                                                  (float)a[5].d, &err)))
SW_PY_ON_DEVICE(device_block_verdict,
                "device_block_verdict comm:O block:n bits:i verdict:A records:A count:N stream:A",
                ON_BLOCKS(a[6], sw_device_block_verdict(&blocks, a[3].address, a[4].address,
                                                        a[5].size, &err)))
SW_PY_ON_DEVICE(device_block_fold,
                "device_block_fold comm:O block:n bits:i out:A own:A others:A stride_bytes:K "
                "own_index:i world_size:i count:N scale:d rest:A stream:A",
                ON_BLOCKS(a[12],
                          sw_device_block_fold(&blocks, a[3].address,
                                               &(sw_device_wires){.own = a[4].address,
                                                                  .others = a[5].address,
                                                                  .stride_bytes = (size_t)a[6].word,
                                                                  .own_index = a[7].i,
                                                                  .count = a[8].i},
                                               a[9].size, (float)a[10].d, a[11].address, &err)))

PyMethodDef sw_py_device_codec_functions[] = {
    SW_PY_FUNCTION(
        device_block_encode, "comm, block, bits, parts, stream, /",
        "Encode parts (records, source or 0 for zeros, error, numel) like block_encode."),
    SW_PY_FUNCTION(device_block_fold,
                   "comm, block, bits, out, own, others, stride_bytes, own_index, world_size, "
                   "count, scale, rest, stream, /",
                   "Fold like block_fold. Rank r's records are at others + r * stride_bytes, but "
                   "own ones at own."),
    SW_PY_FUNCTION(device_block_verdict, "comm, block, bits, verdict, records, count, stream, /",
                   "Set the int32 to 0 if all records have finite values, else to 1."),
    SW_PY_FUNCTION(device_block_decode, "comm, block, bits, parts, verdict, stream, /",
                   "Decode parts (values, error, records or 0, own, numel) like block_decode; keep "
                   "errors if the verdict is 1."),
    SW_PY_FUNCTION(
        device_block_owe, "comm, block, bits, parts, verdict, scale, stream, /",
        "Add rest * scale to the error of parts (error, rest, numel), unless the verdict is 1."),
    {NULL, NULL, 0, NULL},
};
