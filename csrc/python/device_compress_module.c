/* device_compress_module.c - the module's functions that compress GPU gradients: the codec of
 * blocks, PowerSGD, and the arithmetic of its messages. Addresses are integers. Each call enqueues
 * work on the given stream and returns. */
#include "compress/device_block_round.h"
#include "compress/device_codec.h"
#include "compress/device_powersgd_round.h"
#include "kernels/kernels.h"
#include "python/device_object.h"

/* ---- blocks: comm, block, bits, ... ---- */

SW_PY_ROW(fill_quantize, sw_quantize_part, .records = a[0].address, .source = a[1].address,
          .error = a[2].address, .numel = a[3].word)

SW_PY_ROW(fill_decode, sw_decode_part, .values = a[0].address, .error = a[1].address,
          .records = a[2].address, .own = a[3].address, .numel = a[4].word)

SW_PY_ROW(fill_span, sw_block_span, .values = a[0].address, .error = a[1].address,
          .offset = a[2].size, .numel = a[3].size)

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

#define SPAN "span values:A error:A offset:N numel:N"

/* a[]: block, bits, spans, share, keeps_slice, rank, world_size */
static sw_status count_records(const sw_py_arg *a, sw_py_table *spans, size_t *count, sw_error *err)
{
    const sw_block_codec codec = {a[0].size, a[1].i};
    sw_block_cut cut;
    SW_TRY(sw_block_codec_check(&codec, err));
    if (a[6].i < 1 || a[5].i < 0 || a[5].i >= a[6].i)
        SW_FAIL(err, SW_E_INVALID, "block_slice_records: rank must be in [0, %d), got %d", a[6].i,
                a[5].i);
    SW_TRY(sw_block_cut_init(&cut, &codec, spans->rows, spans->count, a[3].size, a[4].p, a[5].i,
                             a[6].i, err));
    *count = cut.each;
    sw_block_cut_fini(&cut);
    return SW_OK;
}

static PyObject *number_if(PyObject *finished, uint64_t number)
{
    SW_PY_OWNED *done = finished;
    return done ? PyLong_FromUnsignedLongLong(number) : NULL;
}

SW_PY_METHOD_ON_ROWS(block_slice_records, PyObject,
                     "block_slice_records block:N bits:i spans:L share:N keeps_slice:p rank:i "
                     "world_size:i",
                     size_t count = 0, 2, SPAN, sw_block_span, fill_span, true,
                     count_records(a, &rows, &count, &err),
                     number_if(sw_py_finish(self, status, &err), count))

/* The memory in which a host's ranks add `numel` float32 values, and their number; one host: 0, 0
 * and 1. */
static sw_status size_hosts(sw_device_comm *comm, size_t numel, size_t *sizes, sw_error *err)
{
    const sw_host_map *map = comm->peers ? sw_device_hosts_map(comm) : NULL;
    sw_device_hosts hosts = {.comm = NULL};
    sizes[2] = 1;
    if (!map)
        return SW_OK;
    sw_status status = sw_device_hosts_init(&hosts, comm, map, NULL, err);
    if (status == SW_OK) {
        sw_device_hosts_sizes(&hosts, numel, &sizes[0], &sizes[1]);
        sizes[2] = (size_t)sw_host_size(&hosts.map, hosts.host);
    }
    sw_device_hosts_fini(&hosts);
    return status;
}

static PyObject *sizes_if(PyObject *finished, const size_t *sizes)
{
    SW_PY_OWNED *done = finished;
    return done ? Py_BuildValue("(nnn)", (Py_ssize_t)sizes[0], (Py_ssize_t)sizes[1],
                                (Py_ssize_t)sizes[2])
                : NULL;
}

SW_PY_METHOD_WITH(device_hosts_sizes, PyObject, "device_hosts_sizes comm:O numel:N",
                  SW_PY_DEVICE_LOCALS;
                  size_t sizes[3] = {0}, SW_PY_ENTER_GPU,
                  (comm = gpu->comm, size_hosts(comm, a[1].size, sizes, &err)),
                  sizes_if(sw_py_device_finish(gpu, status, &err), sizes))

/* a[]: comm, block, bits, spans, share, keeps_slice, message, received, whole, rest, flags, flat,
 * flat_numel, contributions, sums, stream */
static sw_status run_round(sw_device_comm *comm, const sw_py_arg *a, sw_py_table *spans,
                           uint64_t *sent_bytes, sw_error *err)
{
    const sw_block_codec codec = {a[1].size, a[2].i};
    const sw_device_block_memory memory = {.message = a[6].address,
                                           .received = a[7].address,
                                           .whole = a[8].address,
                                           .rest = a[9].address,
                                           .flags = a[10].address,
                                           .flat = {a[11].address, a[12].size, SW_DTYPE_FLOAT32}};
    const sw_host_map *map = sw_device_hosts_map(comm);
    sw_device_hosts hosts = {.comm = NULL};
    sw_block_cut cut;
    SW_TRY(sw_block_codec_check(&codec, err));
    SW_TRY(sw_block_cut_init(&cut, &codec, spans->rows, spans->count, a[4].size, a[5].p,
                             comm->peers->rank, comm->peers->world_size, err));
    sw_status status = map ? sw_device_hosts_init(&hosts, comm, map, NULL, err) : SW_OK;
    hosts.contributions = a[13].address;
    hosts.sums = a[14].address;
    if (status == SW_OK)
        status = sw_device_block_round(comm, map ? &hosts : NULL, &cut, &memory, a[5].p,
                                       a[15].address, sent_bytes, err);
    sw_device_hosts_fini(&hosts);
    sw_block_cut_fini(&cut);
    return status;
}

SW_PY_METHOD_ON_ROWS(device_block_round, PyObject,
                     "device_block_round comm:O block:N bits:i spans:L share:N keeps_slice:p "
                     "message:A received:A whole:A rest:A flags:A flat:A flat_numel:N "
                     "contributions:A sums:A stream:A",
                     SW_PY_DEVICE_LOCALS;
                     uint64_t sent = 0, 3, SPAN, sw_block_span, fill_span, SW_PY_ENTER_GPU,
                     (comm = gpu->comm, run_round(comm, a, &rows, &sent, &err)),
                     number_if(sw_py_device_finish(gpu, status, &err), sent))

/* ---- PowerSGD ---- */

static bool fill_matrix(const sw_py_arg *a, void *row, void *module)
{
    sw_device_matrix *out = row;
    sw_error err;
    *out = (sw_device_matrix){.matrix = {.gradient = a[0].address,
                                         .memory = a[1].address,
                                         .left = a[2].address,
                                         .right = a[3].address,
                                         .basis = a[4].address,
                                         .rows = a[5].size,
                                         .cols = a[6].size,
                                         .rank = a[7].size,
                                         .seed = a[8].word,
                                         .memory_dtype = a[9].dtype},
                              .begins = a[10].p};
    if (sw_powersgd_check(&out->matrix, &err) == SW_OK)
        return true;
    sw_py_raise(module, &err, NULL);
    return false;
}

SW_PY_ROW(fill_small, sw_device_small, a[0].address, a[1].size)

typedef struct factor_tables {
    sw_py_table matrices, small; /* owned */
    sw_device_factors factors;
} factor_tables;

static void factor_tables_fini(factor_tables *tables)
{
    sw_py_table_fini(&tables->matrices);
    sw_py_table_fini(&tables->small);
}

/* Reads matrices, small parameters, the wire's dtype, and whether factors settle. */
static bool factor_tables_init(factor_tables *t, PyObject *module, const sw_py_arg *a)
{
    *t = (factor_tables){.matrices = {0}};
    if (!sw_py_table_init(&t->matrices, a[0].o,
                          "matrix gradient:A memory:A left:A right:A basis:A rows:N cols:N rank:N "
                          "seed:K dtype:T begins:p",
                          sizeof(sw_device_matrix), fill_matrix, module) ||
        !sw_py_table_init(&t->small, a[1].o, "small values:A numel:N", sizeof(sw_device_small),
                          fill_small, NULL))
        return false;
    t->factors = (sw_device_factors){.matrices = t->matrices.rows,
                                     .matrix_count = t->matrices.count,
                                     .small = t->small.rows,
                                     .small_count = t->small.count,
                                     .wire = a[2].dtype,
                                     .settles = a[3].p};
    return true;
}

#define FACTORS "matrices:L small:L wire:T settles:p "

static PyObject *device_powersgd_sizes(PyObject *module, PyObject *args)
{
    __attribute__((cleanup(factor_tables_fini))) factor_tables t = {.matrices = {0}};
    sw_py_arg a[5];
    size_t slice_bytes, scratch_numel;
    if (!sw_py_read("device_powersgd_sizes " FACTORS "world_size:i", args, NULL, a) ||
        !factor_tables_init(&t, module, a))
        return NULL;
    if (a[4].i < 1)
        return PyErr_Format(PyExc_ValueError,
                            "device_powersgd_sizes: world_size must be positive, got %d", a[4].i);
    sw_device_factor_sizes(&t.factors, a[4].i, &slice_bytes, &scratch_numel);
    return Py_BuildValue("(nn)", (Py_ssize_t)slice_bytes, (Py_ssize_t)scratch_numel);
}

static PyObject *device_powersgd_round(PyObject *module, PyObject *args)
{
    __attribute__((cleanup(factor_tables_fini))) factor_tables t = {.matrices = {0}};
    sw_py_arg a[11];
    uint64_t sent = 0;
    sw_error err;
    if (!sw_py_read("device_powersgd_round comm:O " FACTORS
                    "message:A received:A whole:A scratch:A verdict:A stream:A",
                    args, NULL, a) ||
        !factor_tables_init(&t, module, a + 1))
        return NULL;
    device_comm_object *gpu = sw_py_device_comm_of(module, a[0].o);
    if (!gpu || !sw_py_device_enter(gpu))
        return NULL;
    const sw_device_factor_memory memory = {.message = a[5].address,
                                            .received = a[6].address,
                                            .whole = a[7].address,
                                            .scratch = a[8].address,
                                            .verdict = a[9].address};
    sw_status status = SW_PY_WITHOUT_GIL(
        sw_device_powersgd_round(gpu->comm, &t.factors, &memory, a[10].address, &sent, &err));
    return number_if(sw_py_device_finish(gpu, status, &err), sent);
}

SW_PY_ON_DEVICE(device_fold,
                "device_fold comm:O to:A own:A rest:A numel:K stride_bytes:K own_index:i count:i "
                "dtype:s is_mean:p stream:A",
                sw_kernel_launch(&comm->kernels, SW_KERNEL_FOLD,
                                 &(sw_fold_args){.to = a[1].address,
                                                 .own = a[2].address,
                                                 .rest = a[3].address,
                                                 .numel = a[4].word,
                                                 .stride_bytes = a[5].word,
                                                 .scale = a[9].p ? 1.0 / a[7].i : 1.0,
                                                 .dtype = (int)sw_dtype_from_name(a[8].s),
                                                 .op = (int)(a[9].p ? SW_REDOP_MEAN : SW_REDOP_SUM),
                                                 .own_index = a[6].i,
                                                 .source_count = a[7].i},
                                 a[10].address, &err))
SW_PY_ON_DEVICE(
    device_cast,
    "device_cast comm:O to:A to_dtype:s source:A source_dtype:s numel:K scale:d stream:A",
    sw_kernel_launch(&comm->kernels, SW_KERNEL_CAST,
                     &(sw_cast_args){.to = a[1].address,
                                     .from = a[3].address,
                                     .numel = a[5].word,
                                     .scale = (float)a[6].d,
                                     .to_dtype = (int)sw_dtype_from_name(a[2].s),
                                     .from_dtype = (int)sw_dtype_from_name(a[4].s)},
                     a[7].address, &err))

PyMethodDef sw_py_device_compress_functions[] = {
    SW_PY_FUNCTION(
        device_block_encode, "comm, block, bits, parts, stream, /",
        "Encode parts (records, source or 0 for zeros, error, numel) like block_encode."),
    SW_PY_FUNCTION(device_block_decode, "comm, block, bits, parts, verdict, stream, /",
                   "Decode parts (values, error, records or 0, own, numel) like block_decode; keep "
                   "errors if the verdict is 1."),
    SW_PY_FUNCTION(block_slice_records,
                   "block, bits, spans, share, keeps_slice, rank, world_size, /",
                   "Return the records in a slice of the message of spans (values, error or 0, "
                   "offset, numel)."),
    SW_PY_FUNCTION(device_block_round,
                   "comm, block, bits, spans, share, keeps_slice, message, received, whole, rest, "
                   "flags, flat, flat_numel, contributions, sums, stream, /",
                   "Average the spans as records and return the bytes sent. message, received and "
                   "whole have world_size slices; rest and flags (world_size + 1 int32): 0 without "
                   "error feedback. Over several hosts (device_hosts_sizes) flat is the float32 "
                   "memory in which the spans lie; else 0, as the next three."),
    SW_PY_FUNCTION(device_hosts_sizes, "comm, numel, /",
                   "Return the bytes of contributions and of sums in which the ranks of a host add "
                   "float32 values first, and their number; (0, 0, 1) if they do not."),
    SW_PY_FUNCTION(device_powersgd_sizes, "matrices, small, wire, settles, world_size, /",
                   "Return (bytes of a slice of the message, floats of scratch memory)."),
    SW_PY_FUNCTION(
        device_powersgd_round,
        "comm, matrices, small, wire, settles, message, received, whole, scratch, "
        "verdict, stream, /",
        "Average matrices (gradient, memory, left, right, basis, rows, cols, rank, seed, "
        "the memory's dtype, begins) and small parameters (values, numel), and return "
        "the bytes sent."),
    SW_PY_FUNCTION(
        device_fold,
        "comm, to, own, rest, numel, stride_bytes, own_index, count, dtype, is_mean, stream, /",
        "Fold contributions in rank order: number k is at rest + k * stride_bytes, own_index at "
        "own."),
    SW_PY_FUNCTION(device_cast, "comm, to, to_dtype, source, source_dtype, numel, scale, stream, /",
                   "Scale and round."),
    {NULL, NULL, 0, NULL},
};
