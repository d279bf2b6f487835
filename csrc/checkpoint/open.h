/* open.h - find the folder of a checkpoint and open its files.
 *
 * Thread rule: any. */
#ifndef SW_CHECKPOINT_OPEN_H
#define SW_CHECKPOINT_OPEN_H

#include <stdbool.h>

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "platform/file.h"

/* Return the name that a checkpoint has while it is replaced on a file system that cannot exchange
 * two names: `folder`.replaced, without slashes at the end of `folder`. */
SW_MUST_USE sw_status sw_checkpoint_replaced_name(char replaced[SW_PATH_BYTES], const char *folder,
                                                  sw_error *err);

/* Find the path of the checkpoint `folder`: its replaced name if only that exists, else `folder`
 * itself. */
SW_MUST_USE sw_status sw_checkpoint_locate(const char *folder, char found[SW_PATH_BYTES],
                                           sw_error *err);

/* Find a checkpoint; check only that a manifest exists. False: none found. */
bool sw_checkpoint_stands(const char *folder, char found[SW_PATH_BYTES]);

/* Open a checkpoint: read its manifest and check the size of every file. SW_E_INVALID or SW_E_OS:
 * not a checkpoint. */
SW_MUST_USE sw_status sw_checkpoint_open(const char *folder, sw_manifest *manifest, sw_error *err);

/* Open the checkpoint at `folder`, or at its replaced name if `folder` is missing. Look again if a
 * writer moved it meanwhile. `found`: its path. */
SW_MUST_USE sw_status sw_checkpoint_find(const char *folder, char found[SW_PATH_BYTES],
                                         sw_manifest *manifest, sw_error *err);

/* Open a file of a checkpoint without following links; its size must match the manifest. Bypass the
 * page cache if `direct` is set and the file system allows it. `path` is for messages. The file
 * begins at offset `memory_begin` of *fd. */
SW_MUST_USE sw_status sw_checkpoint_open_file(const char *folder, const sw_manifest_file *file,
                                              bool direct, char path[SW_PATH_BYTES], int *fd,
                                              sw_error *err);

#endif
