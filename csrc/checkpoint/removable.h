/* removable.h - what a save, and retention after it, may take away.
 *
 * The rule: a folder that holds nothing but what a checkpoint lists. Whatever else has its name is
 * somebody's, and stays.
 *
 * Thread rule: any.
 */
#ifndef SW_CHECKPOINT_REMOVABLE_H
#define SW_CHECKPOINT_REMOVABLE_H

#include "base/status.h"

/* SW_OK: nothing is at `path`, or an empty folder, or a checkpoint that this program could have
 * written and nothing else: every file in it is one that its manifest lists or, where the manifest
 * is damaged, one that a checkpoint may have by its name, state.json among them. SW_E_UNSUPPORTED:
 * a checkpoint of a newer version. Else SW_E_INVALID names what it is, and SW_E_OS what kept it
 * from being looked at. Cost: one read of the manifest, one listing of the folder. */
SW_MUST_USE sw_status sw_checkpoint_check_removable(const char *path, sw_error *err);

/* The same for a folder and what would be taken for it while it is missing (open.h): both of what a
 * save to `folder` takes the place of. */
SW_MUST_USE sw_status sw_checkpoint_check_replaceable(const char *folder, sw_error *err);

#endif
