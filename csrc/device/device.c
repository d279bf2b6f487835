/* device.c - functions that every form of a device shares. */
#include "device/device.h"

sw_status sw_device_refuse_capture(sw_device *device, sw_stream *stream, const char *operation,
                                   sw_error *err)
{
    bool capturing;
    SW_TRY(device->ops->stream_is_capturing(device, stream, &capturing, err));
    if (capturing)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "%s: the stream is being captured into a CUDA graph, which is not supported; run "
                "it outside of the capture",
                operation);
    return SW_OK;
}

void sw_device_destroy(sw_device *device)
{
    if (device)
        device->ops->destroy(device);
}
