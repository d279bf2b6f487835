/* compress_module.c - a block's bytes, and the 16-bit codec on addresses; codec_type.c has
 * compressors. */
#include "compress/codec.h"
#include "python/method.h"

static bool check_codec(PyObject *module, const sw_py_arg *a)
{
    const sw_block_codec codec = {a[0].n < 0 ? 0 : a[0].size, a[1].i};
    sw_error err;
    SW_PY_OWNED *done = sw_py_finish(module, sw_block_codec_check(&codec, &err), &err);
    return done != NULL;
}

#define CODEC &(const sw_block_codec){a[0].size, a[1].i} /* once it is checked */

SW_PY_VALUE(block_record_bytes, PyObject, "block_record_bytes block:n bits:i", check_codec(self, a),
            PyLong_FromSize_t(sw_block_codec_record_bytes(CODEC)))
SW_PY_METHOD(half_encode, PyObject, "half_encode dtype:s wire:A source:A numel:N scale:d", true,
             sw_half_encode(sw_dtype_from_name(a[0].s), a[1].address, a[2].address, a[3].size,
                            (float)a[4].d, &err),
             sw_py_finish(self, status, &err))
SW_PY_METHOD(half_decode, PyObject, "half_decode dtype:s out:A wire:A numel:N", true,
             sw_half_decode(sw_dtype_from_name(a[0].s), a[1].address, a[2].address, a[3].size,
                            &err),
             sw_py_finish(self, status, &err))

PyMethodDef sw_py_compress_functions[] = {
    SW_PY_FUNCTION(block_record_bytes, "block, bits, /", "Return the bytes of one record."),
    SW_PY_FUNCTION(half_encode, "dtype, wire, source, numel, scale, /", "Scale and round."),
    SW_PY_FUNCTION(half_decode, "dtype, out, wire, numel, /", "Widen to float32."),
    {NULL, NULL, 0, NULL},
};
