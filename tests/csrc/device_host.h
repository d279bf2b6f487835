/* device_host.h - the host as a device, for tests without a driver. See device_host.c. */
#ifndef SW_TEST_DEVICE_HOST_H
#define SW_TEST_DEVICE_HOST_H

#include "device/device.h"

SW_MUST_USE sw_status sw_device_host_create(sw_device **device, sw_error *err);

#endif
