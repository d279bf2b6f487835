/* removable.h - the folders that a save, and retention after it, may remove.
 *
 * The rule: a folder may be removed if it holds only files that its checkpoint lists. Any other
 * folder of that name may hold user data, and stays.
 *
 * Thread rule: any. */
#ifndef SW_CHECKPOINT_REMOVABLE_H
#define SW_CHECKPOINT_REMOVABLE_H

#include "base/status.h"

/* SW_OK: `path` is missing, an empty folder, or a checkpoint that this program could have written,
 * without other files. Every file must be listed by its manifest. If the manifest is damaged, every
 * name must be one that a checkpoint may have, state.json among them. SW_E_UNSUPPORTED: a
 * checkpoint of a newer version. SW_E_INVALID names any other content; SW_E_OS: the folder could
 * not be examined. Cost: one read of the manifest, one listing of the folder. */
SW_MUST_USE sw_status sw_checkpoint_check_removable(const char *path, sw_error *err);

/* Check a folder and its replaced name (open.h) likewise: a save to `folder` replaces both. */
SW_MUST_USE sw_status sw_checkpoint_check_replaceable(const char *folder, sw_error *err);

#endif
