// abi_dlpack.cpp - compares csrc/python/dlpack_abi.h with the dlpack.h that torch ships. DLPack 1.2 brought the exchange
// table; an older torch has none, and the engine then calls Python.
#include <ATen/dlpack.h>
#include <c10/core/DeviceType.h>

#include <cstddef>

#include "alike.hpp"
#include "python/dlpack_abi.h"

#define SAME(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs), #theirs)
#define SAME_PLACE(our, member, their, path) static_assert(offsetof(our, member) == offsetof(their, path), #path)

static_assert(sizeof(dl_tensor) == sizeof(DLTensor));
SAME_PLACE(dl_tensor, data, DLTensor, data);
SAME_PLACE(dl_tensor, device_type, DLTensor, device.device_type);
SAME_PLACE(dl_tensor, device_id, DLTensor, device.device_id);
SAME_PLACE(dl_tensor, ndim, DLTensor, ndim);
SAME_PLACE(dl_tensor, code, DLTensor, dtype.code);
SAME_PLACE(dl_tensor, bits, DLTensor, dtype.bits);
SAME_PLACE(dl_tensor, lanes, DLTensor, dtype.lanes);
SAME_PLACE(dl_tensor, shape, DLTensor, shape);
SAME_PLACE(dl_tensor, strides, DLTensor, strides);
SAME_PLACE(dl_tensor, byte_offset, DLTensor, byte_offset);
static_assert(sizeof(dl_managed_tensor) == sizeof(DLManagedTensor));
SAME_PLACE(dl_managed_tensor, context, DLManagedTensor, manager_ctx);
SAME_PLACE(dl_managed_tensor, deleter, DLManagedTensor, deleter);
SAME(DL_CPU, kDLCPU);
SAME(DL_CUDA, kDLCUDA);
SAME(DL_INT, kDLInt);
SAME(DL_UINT, kDLUInt);
SAME(DL_FLOAT, kDLFloat);
SAME(DL_BFLOAT, kDLBfloat);
SAME(DL_COMPLEX, kDLComplex);
SAME(DL_BOOL, kDLBool);
SAME(DL_FLOAT8_E4M3FN, kDLFloat8_e4m3fn);
SAME(DL_FLOAT8_E4M3FNUZ, kDLFloat8_e4m3fnuz);
SAME(DL_FLOAT8_E5M2, kDLFloat8_e5m2);
SAME(DL_FLOAT8_E5M2FNUZ, kDLFloat8_e5m2fnuz);
SAME(DL_FLOAT8_E8M0FNU, kDLFloat8_e8m0fnu);

#if defined(DLPACK_MAJOR_VERSION) && (DLPACK_MAJOR_VERSION > 1 || DLPACK_MINOR_VERSION >= 2)
static_assert(DLPACK_MAJOR_VERSION == 1, "a table of another major version is refused: read the changes");
SAME_PLACE(exchange_table, major, DLPackExchangeAPI, header.version.major);
SAME_PLACE(exchange_table, minor, DLPackExchangeAPI, header.version.minor);
SAME_PLACE(exchange_table, previous, DLPackExchangeAPI, header.prev_api);
SAME_PLACE(exchange_table, dltensor_from_py_object_no_sync, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
static_assert(alike_functions(decltype(exchange_table::dltensor_from_py_object_no_sync){},
                              decltype(DLPackExchangeAPI::dltensor_from_py_object_no_sync){}));
#endif
