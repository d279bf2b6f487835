/* codec_object.h - the objects Codec (codec_type.c) and Exchange (exchange_type.c).
 *
 * Thread rule: with the GIL held. */
#pragma once

#include "compress/comm_average.h"
#include "python/method.h"

typedef struct exchange_object {
    PyObject_HEAD comm_object *comm; /* owned; NULL over a transport */
    sw_comm_average *average;        /* owned; NULL over a transport */
    PyObject *transport;             /* owned; NULL over a communicator */
    sw_exchange *exchange;           /* owned; NULL over a communicator */
    sw_py_use use;
} exchange_object;

typedef struct codec_object {
    PyObject_HEAD sw_compressor *compressor; /* holds a reference; NULL before init */
    sw_py_use use;
} codec_object;
