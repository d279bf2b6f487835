/* device_stage_object.h - the DeviceStage object, shared by its type and the saver that copies
 * through it.
 *
 * Thread rule: with the GIL held.
 */
#ifndef SW_PYTHON_DEVICE_STAGE_OBJECT_H
#define SW_PYTHON_DEVICE_STAGE_OBJECT_H

#include "checkpoint/device_stage.h"
#include "python/engine.h"

typedef struct device_stage_object {
    PyObject_HEAD sw_device_stage *stage; /* owned; NULL before init */
    long owner_pid;
} device_stage_object;

#endif
