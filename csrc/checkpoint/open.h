/* open.h - the folder of a checkpoint: where it lies, and its files opened as the format wants.
 *
 * Thread rule: any.
 */
#ifndef SW_CHECKPOINT_OPEN_H
#define SW_CHECKPOINT_OPEN_H

#include <stdbool.h>

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "platform/file.h"

/* What a checkpoint is called while it is replaced where two names cannot be exchanged:
 * `folder`.replaced, without slashes at the end of `folder`. */
SW_MUST_USE sw_status sw_checkpoint_replaced_name(char replaced[SW_PATH_BYTES], const char *folder,
                                                  sw_error *err);

/* Opens a checkpoint: reads its manifest and looks at the size of every file. SW_E_INVALID or
 * SW_E_OS: it is none. */
SW_MUST_USE sw_status sw_checkpoint_open(const char *folder, sw_manifest *manifest, sw_error *err);

/* The same of the checkpoint called `folder`, which lies there, or under its replaced name if
 * nothing is there; looks again if a writer took it away meanwhile. `found`: where it lies. */
SW_MUST_USE sw_status sw_checkpoint_find(const char *folder, char found[SW_PATH_BYTES],
                                         sw_manifest *manifest, sw_error *err);

/* Opens a file of it, without following links; its size is the manifest's. Past the page cache when
 * `direct` and the file system allows it. `path` is for messages. */
SW_MUST_USE sw_status sw_checkpoint_open_file(const char *folder, const sw_manifest_file *file,
                                              bool direct, char path[SW_PATH_BYTES], int *fd,
                                              sw_error *err);

#endif
