/* device.c - what is alike for all forms of a device. */
#include "device/device.h"

void sw_device_destroy(sw_device *device)
{
    if (device)
        device->ops->destroy(device);
}
